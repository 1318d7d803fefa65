"""Start of every Python of a run whose telemetry may be left out.

Python imports this module by itself where its folder is on PYTHONPATH. If the environment asks for
it, the functions in `REPLACEMENTS` are replaced as soon as their module was imported; otherwise
both sides of the comparison start alike.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any


def _do_nothing(*values: object, **named: object) -> None:
    """Record nothing."""


def _measure_nothing(*values: object, **named: object) -> dict[str, float]:
    """Return no metrics."""
    return {}


async def _watch_nothing(*values: object) -> None:
    """Wait to be cancelled."""
    import asyncio  # not before a process needs it

    await asyncio.Event().wait()


def _leave_out_entropy(network: Any, batch: Any, logits_1NV: Any) -> tuple[Any, Any]:
    """Log-probabilities without entropies, which are 0 then."""
    # not before a process needs it
    from areal_hpc.trainer.model.logprobs import consume_logits_into_token_logprobs
    from areal_hpc.trainer.step import _list_scoring_arguments

    scored = _list_scoring_arguments(network, batch, logits_1NV)
    logprobs_N = consume_logits_into_token_logprobs(*scored)
    return logprobs_N, logprobs_N.new_zeros(logprobs_N.shape)


REPLACEMENTS: dict[str, dict[str, Any]] = {
    "areal_hpc.rundir.telemetry.events": {"EventLog.record": _do_nothing},
    "areal_hpc.rundir.telemetry.spans": {"SpanLog.add": _do_nothing, "SpanLog._run": _do_nothing},
    "areal_hpc.trainer.annotations": {"choose_rows_to_annotate": _measure_nothing},
    "areal_hpc.rollout.episode_watch": {"EpisodeWatch.run": _watch_nothing},
    "areal_hpc.metrics.writer": {"AlertReporter.report_new_alerts": _do_nothing},
    "areal_hpc.trainer.batch.batch_metrics": {
        "summarize_replies": _measure_nothing,
        "summarize_episodes": _measure_nothing,
    },
    "areal_hpc.trainer.learner": {"measure_training_speed": _measure_nothing},
    "areal_hpc.trainer.step": {"score_tokens": _leave_out_entropy},
}
"""Replacements of functions by module."""


class _Replacer(importlib.abc.MetaPathFinder):
    """Finder of the modules to change, which are loaded as usual first."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REPLACEMENTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = partial(_load_and_replace, load)  # type: ignore[method-assign]
        return spec


def _load_and_replace(load: Any, module: ModuleType) -> None:
    load(module)
    for path, replacement in REPLACEMENTS[module.__name__].items():
        *owner, name = path.split(".")
        target: Any = getattr(module, owner[0]) if owner else module
        getattr(target, name)  # an AttributeError here: it has another name now
        setattr(target, name, replacement)


if os.environ.get("WITHOUT_TELEMETRY") == "1":
    sys.meta_path.insert(0, _Replacer())

"""`PPOTrainer`: what AReaL's training scripts end with, on the very jobs of `areal-hpc run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from areal_hpc.areal_config.experiments import BaseExperimentConfig
from areal_hpc.areal_config.run_rules import as_here
from areal_hpc.areal_config.translation import Translation, rule_of, to_recipe
from areal_hpc.cli.run import train
from areal_hpc.errors import RecipeError
from areal_hpc.layout import RunLayout
from areal_hpc.recipe import Recipe, from_values
from areal_hpc.rollout.limits import refuse_unkeepable_limits
from areal_hpc.rollout.travelling import DOTTED_PATH, by_name, is_json, packed, pickled

ALIAS = "areal_hpc.compat"
"""Loaded where this process answers `import areal...`; the agent's processes must then too."""


class PPOTrainer:
    """Trains an agent from a script.

    Rows and agent travel in the run directory. The run is one like any other: it goes on when the
    script is started again, and every command of `areal-hpc` understands it.

    Args:
        config: AReaL's configuration, or a subclass of the user's.
        train_dataset: Rows, each a dict; as `config.train_dataset.path` says when None.
        valid_dataset: Held-out rows.
    """

    def __init__(
        self,
        config: BaseExperimentConfig,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        valid_dataset: Iterable[Mapping[str, Any]] | None = None,
    ) -> None:
        self._config = config
        given = {"train": train_dataset, "valid": valid_dataset}
        self._rows = {split: _lines(rows) for split, rows in given.items() if rows is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the rows. Jobs have ended when `train` returns."""
        self._rows.clear()

    def train(
        self,
        workflow: Any = None,
        eval_workflow: Any = None,
        workflow_kwargs: Mapping[str, Any] | None = None,
        eval_workflow_kwargs: Mapping[str, Any] | None = None,
        dynamic_filter_fn: Any = None,
    ) -> None:
        """Run the jobs to their end, and show how it goes.

        Args:
            workflow: The agent: its dotted path, its class, or itself; by default what the
                configuration names. None in mode `online`.
            eval_workflow: The same again; one agent plays both.
            workflow_kwargs: Arguments of its constructor.
            eval_workflow_kwargs: The same again.
            dynamic_filter_fn: Says of a finished group whether to train it; a function that can be
                imported, or `package.module:function`. It gets `{"rewards": array, "task": row}`.

        Raises:
            RecipeError: Something must change before this can run; all problems at once.
            JobFailedError: A job failed for good.
            SystemExit: The user asked for a stop (130).
        """
        _refuse_slurm(self._config)
        kwargs = dict(workflow_kwargs or {})
        rows = self._rows.get("train")
        translation = to_recipe(self._config, None if rows is None else len(rows))
        tree = translation.recipe
        rollout = tree.setdefault("rollout", {})
        workflow = workflow or rollout.get("workflow")
        _refuse_another_agent(workflow, kwargs, eval_workflow, eval_workflow_kwargs)
        layout = RunLayout(_run_dir(self._config))
        rollout |= {"workflow_kwargs": kwargs, "workflow": ""}
        if workflow:
            rollout |= _travel(workflow, kwargs, layout)
        if dynamic_filter_fn is not None:
            rollout["should_accept"] = _filter_path(dynamic_filter_fn)
        for split in self._rows:
            tree[f"{split}_dataset"] = {"path": str(layout.dataset(split))}
        recipe = from_values(tree)
        for split, lines in self._rows.items():
            _put(lines, layout.dataset(split), recipe, f"{split}_dataset")
        again = " ".join([sys.executable, *sys.argv])
        code = train(recipe, again, sys_path=(_script_folder(),), notes=_notes(translation))
        if code:
            raise SystemExit(code)


def _refuse_slurm(config: BaseExperimentConfig) -> None:
    if config.scheduler.type == "slurm":
        raise RecipeError(
            "a script runs its jobs on this machine",
            key="scheduler.type",
            hint="run once with scheduler.type=local to put the run in place, then give its "
            "recipe.yaml to areal-hpc submit",
        )


def _refuse_another_agent(
    workflow: Any, kwargs: Mapping[str, Any], other: Any, other_kwargs: Mapping[str, Any] | None
) -> None:
    """One agent plays tasks and held-out tasks; sampling may differ (`evaluation.sampling`)."""
    other = workflow if other is None else other
    others = kwargs if other_kwargs is None else dict(other_kwargs)
    if other is workflow and others == kwargs:
        return
    if isinstance(workflow, str) and isinstance(other, str):
        same = as_here(workflow) == as_here(other) and others == kwargs
    else:
        same = pickled((workflow, kwargs)) == pickled((other, others))
    if not same:
        raise RecipeError(
            "eval_workflow is another agent, or has other arguments, than workflow",
            key="eval_workflow",
            hint="leave it out; eval_gconfig says how held-out tasks are sampled",
        )


def _run_dir(config: BaseExperimentConfig) -> Path:
    for name in ("experiment_name", "trial_name"):
        if not getattr(config, name):
            raise RecipeError("this key is required", key=name, hint=f"add {name}=... to the call")
    folder = Path(config.cluster.fileroot).expanduser()
    return (folder / config.experiment_name / config.trial_name).resolve()


def _travel(workflow: Any, kwargs: Mapping[str, Any], layout: RunLayout) -> dict[str, Any]:
    """The keys of `rollout` that name the agent: by its path if there is one, else as a pickle."""
    alias = ALIAS in sys.modules
    path = as_here(workflow) if isinstance(workflow, str) else by_name(workflow)
    if path is not None and is_json(kwargs) and not alias:
        return {"workflow": path, "workflow_kwargs": dict(kwargs)}
    handed = path if path is not None else workflow
    packed(handed, kwargs, layout.workflow_dir, (_script_folder(),), alias)
    return {"workflow": DOTTED_PATH, "workflow_kwargs": {}}


def _filter_path(function: Any) -> str:
    if isinstance(function, str):
        return function
    path = by_name(function)
    if path is None:
        raise RecipeError(
            "the filter of groups must be a function that other processes can import",
            key="dynamic_filter_fn",
            hint="define it in a module beside the script",
        )
    return ":".join(path.rsplit(".", 1))


def _script_folder() -> str:
    """Where the running script imports its own modules from."""
    return str(Path(sys.path[0] if sys.path else "").resolve())


def _lines(rows: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """Rows as lines of strict JSON.

    Raises:
        RecipeError: A row is no dict, or holds what JSON cannot.
    """
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise RecipeError(f"row {number} is a {type(row).__name__}, expected a dict")
        try:
            lines.append(orjson.dumps(dict(row)))
        except TypeError as error:
            raise RecipeError(
                f"row {number} is not JSON-able ({error})",
                hint="use strings, numbers, lists and dicts with string keys",
            ) from error
    if not lines:
        raise RecipeError("the data set is empty", hint="give at least one row")
    return lines


def _put(lines: list[bytes], path: Path, recipe: Recipe, key: str) -> None:
    """Write a task set, visible whole or not at all.

    Raises:
        RecipeError: The run has another one already, or a row has limits that cannot be kept.
    """
    for line in lines:
        refuse_unkeepable_limits(recipe.rollout, recipe.proxy.session_timeout_s, orjson.loads(line))
    text = b"\n".join(lines) + b"\n"
    if path.exists():
        if path.read_bytes() != text:
            raise RecipeError(
                "this run was started with other rows",
                key=key,
                hint="give another trial_name",
            )
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)


def _notes(translation: Translation) -> list[str]:
    """What of the configuration is lost; the script's own keys and handed-over rows are not."""
    return [
        f"lost     {one.key}={one.value}: {one.reason}"
        for one in translation.untranslated
        if rule_of(one.key) and not one.key.endswith("_dataset.path")
    ]

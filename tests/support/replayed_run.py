"""Training on the batches of a recorded run: its steps, in any layout, and their checkpoints."""

import math
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.verify import CheckedShards
from areal_hpc.trainer.batch.training_rows import read_rows_by_ticket
from areal_hpc.wire.trajectory import TrajectoryRow, parse_mixture_shape
from tests.support.rank_server import RankServer, TaskExit
from tests.support.recorded_run import record_run
from tests.support.reference_models import by_checkpoint_name, hf_model
from tests.support.thoroughness import choose

STEPS = 5
LAYOUTS_OF_TWO: list[dict[str, int]] = choose(
    [{"cp": 2}, {"dp": 2}, {"tp": 2}, {"pp": 2}], {"cp": 2}, {"pp": 2}
)
"""Rows, or layers, lie on two ranks."""


def train_run(
    ranks: RankServer,
    paths: RunPaths,
    objective: dict[str, Any],
    parallel: dict[str, int] | None = None,
    *,
    steps: int = STEPS,
    minibatches: int = 2,
    more: dict[str, Any] | None = None,
    **scenario: Any,
) -> TaskExit:
    parallel = parallel or {}
    settings = {
        "total_steps": steps, "minibatches": minibatches, "parallel": parallel,
        "objective": objective, **(more or {}),
    }  # fmt: skip
    size = math.prod(count for name, count in parallel.items() if name != "ep")
    return ranks.run(paths, "replay", size, trainer=settings, **scenario)


def train_copy(
    ranks: RankServer, source: Path, folder: Path, objective: dict[str, Any], **settings: Any
) -> list[dict[str, float]]:
    """Train a copy of a recorded run; the lines of its metrics."""
    paths = RunPaths(shutil.copytree(source, folder))
    outcome = train_run(ranks, paths, objective, **settings)
    assert set(outcome.codes) == {0}, outcome.log
    return read_readable_records(paths.metrics)


def check_layouts_agree(
    ranks: RankServer,
    source: Path,
    folder: Path,
    objective: dict[str, Any],
    names: Collection[str],
    *,
    layouts: Sequence[dict[str, Any]] = LAYOUTS_OF_TWO,
    rel: float = 2e-5,
    abs: float = 1e-6,  # noqa: A002  (as pytest.approx calls it)
    **settings: Any,
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Check that every layout agrees with one rank; return the metrics of both, for each step.

    A layout is the sizes of its groups, and may name further settings of the trainer in `more`.
    """
    expected = train_copy(ranks, source, folder / "1", objective, **settings)
    pairs = []
    for number, layout in enumerate(layouts):
        parallel = {name: size for name, size in layout.items() if name != "more"}
        own = settings | ({"more": layout["more"]} if "more" in layout else {})
        actual = train_copy(
            ranks, source, folder / f"2-{number}", objective, parallel=parallel, **own
        )
        for line, other in zip(actual, expected, strict=True):
            for name in {*names} & other.keys():
                same = pytest.approx(other[name], rel=rel, abs=abs)
                assert line[name] == same, (layout, line["step"], name)
            pairs.append((line, other))
    return pairs


def check_killed_run_ends_alike(
    ranks: RankServer, source: Path, folder: Path, fault: str, *settings: Any, **more: Any
) -> tuple[RunPaths, RunPaths, list[dict[str, Any]]]:
    """Check that a killed and resumed run ends with the bits of one that is left alone.

    Both, and what the ranks of the one that was killed hold.
    """
    alone, killed = (RunPaths(shutil.copytree(source, folder / name)) for name in ("a", "k"))
    expected = train_run(ranks, alone, *settings, **more)
    assert set(expected.codes) == {0}, expected.log
    assert -9 in train_run(ranks, killed, *settings, **more, faults=f"{fault}=kill").codes
    resumed = train_run(ranks, killed, *settings, **more)
    assert set(resumed.codes) == {0}, resumed.log
    assert resumed.reports[0]["began_at"] in (2, 4)
    for report, other in zip(resumed.reports, expected.reports, strict=True):
        assert report["digests"] == other["digests"]
    return alone, killed, resumed.reports


def copy_for_mixture(source: Path, root: Path) -> Path:
    """Copy the batches of a run for a mixture of experts."""
    shutil.copytree(source, root)
    model, folder = hf_model("qwen3_moe"), RunPaths(root).starting_model_dir
    model.config.save_pretrained(folder)
    weights = by_checkpoint_name(model.state_dict())
    save_file(
        {name: data.contiguous() for name, data in weights.items()}, folder / "model.safetensors"
    )
    return root


def record_routed_run(root: Path, steps: int) -> RunPaths:
    mixture = parse_mixture_shape(hf_model("qwen3_moe").config.to_dict())
    dense = record_run(root / "dense", steps, mixture=mixture)
    return RunPaths(copy_for_mixture(dense.root, root / "run"))


def read_recorded_rows(paths: RunPaths, step: int = 1) -> list[TrajectoryRow]:
    shards = CheckedShards(paths.shards_dir, paths.shard_index_dir)
    return [row for rows in read_rows_by_ticket(read_manifest(paths, step), shards) for row in rows]

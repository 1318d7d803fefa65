"""Steps on stale batches from shards, end to end, against transformers in float64."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.recipe.presets import PRESETS
from areal_hpc.recipe.sections.trainer import AdamConfig, ObjectiveConfig
from areal_hpc.rundir.paths import RunPaths
from tests.support.float64_trainer import Float64Trainer
from tests.support.rank_server import RankServer
from tests.support.recorded_run import TRAINER
from tests.support.replayed_run import read_recorded_rows, train_copy
from tests.support.thoroughness import choose

STEPS, MINIBATCHES = 3, 2
OBJECTIVES: dict[str, dict[str, Any]] = {
    "default": {},
    "dr_grpo": {"loss_scale_tokens": 9},
    "gspo": {},
    "cispo": {"clip_high": 1e-3},
    "rloo": {},
}
"""Presets, and what is said beside them; with less the clip of `cispo` would not act."""


@pytest.mark.parametrize("name", choose(OBJECTIVES, *[*OBJECTIVES][:2]))
def test_steps_are_those_of_transformers_in_float64(
    ranks: RankServer, stale: Path, tmp_path: Path, name: str
) -> None:
    tree = {**PRESETS[name].objective, **OBJECTIVES[name]}
    paths = RunPaths(stale)
    reference = Float64Trainer(
        paths.starting_model_dir,
        ObjectiveConfig.model_validate(tree),
        AdamConfig.model_validate(TRAINER["optimizer"]),
        steps=STEPS,
        minibatches=MINIBATCHES,
    )
    rows_of_steps = [read_recorded_rows(paths, step) for step in range(1, STEPS + 1)]
    expected = [reference.train_batch(rows) for rows in rows_of_steps]
    for count in (1, 2):
        found = train_copy(
            ranks, stale, tmp_path / str(count), tree,
            parallel={"dp": count}, steps=STEPS, minibatches=MINIBATCHES,
        )  # fmt: skip
        for line, (loss, norm) in zip(found, expected, strict=True):
            assert line["loss"] == pytest.approx(loss, rel=2e-6, abs=2e-6), (count, line["step"])
            assert line["grad_norm"] == pytest.approx(norm, rel=1e-5), (count, line["step"])
        if name in ("gspo", "cispo"):
            assert any(line["ratio/clip_fraction"] > 0 for line in found), "the clip acted"
        assert any(line["staleness/max"] > 0 for line in found)

"""What the tier of a GPU node reads out of a run."""

import math
from pathlib import Path

import pytest

from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.trainer.model.families.architecture import find_layout_problems, read_architecture
from tests.support.environments import CHECKOUT
from tests.support.layouts import MIXTURE
from tests.support.node_tier import EXPERT_LAYOUTS, LAYOUTS, summarize_run, write_model


def test_a_run_is_summed_up_from_its_metrics() -> None:
    rows = read_readable_records(CHECKOUT / "tests/samples/quickstart_metrics.jsonl")
    found = summarize_run(rows)
    assert found["steps"] == len(rows) - 1
    assert found["last_reward"] > found["first_reward"]
    assert found["update_s"] > 0
    assert all(map(math.isfinite, found.values()))
    worse = summarize_run([{"reward/mean": 1.0}] * 5 + [{"reward/mean": 0.5}] * 5)
    assert worse["last_reward"] == pytest.approx(0.5)


def test_layouts_fit_a_node_of_eight_and_their_models(tmp_path: Path) -> None:
    for family, layouts in (("qwen3", LAYOUTS), (MIXTURE, EXPERT_LAYOUTS)):
        arch = read_architecture(write_model(family, tmp_path / family))
        for sizes in layouts.values():
            parallel = ParallelConfig.model_validate(sizes)
            assert parallel.world_size <= 8
            assert list(find_layout_problems(arch, parallel)) == []

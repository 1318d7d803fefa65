"""What the tier of a GPU node reads out of a run."""

import math

import pytest

from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.jsonl import read_lines
from tests.support.environments import CHECKOUT
from tests.support.node_tier import EXPERT_LAYOUTS, LAYOUTS, summarize_run


def test_a_run_is_summed_up_from_its_metrics() -> None:
    rows = read_lines(CHECKOUT / "tests/samples/quickstart_metrics.jsonl")
    found = summarize_run(rows)
    assert found["steps"] == len(rows) - 1
    assert found["last_reward"] > found["first_reward"]
    assert found["update_s"] > 0
    assert all(map(math.isfinite, found.values()))
    worse = summarize_run([{"reward/mean": 1.0}] * 5 + [{"reward/mean": 0.5}] * 5)
    assert worse["last_reward"] == pytest.approx(0.5)


def test_layouts_fit_a_node_of_eight() -> None:
    layouts = [*LAYOUTS.values(), *EXPERT_LAYOUTS.values()]
    assert all(ParallelConfig.model_validate(one).world_size <= 8 for one in layouts)

"""What `make gpu8` asks of eight GPUs, rehearsed on processors over gloo: only the device differs.

The kills are those of `test_kill_matrix.py`, which this does not repeat.
"""

from pathlib import Path

import pytest

from tests.support.node_tier import (
    EXPERT_LAYOUTS,
    LAYOUTS,
    plan_for,
    run_and_judge,
    step_in_layout,
)

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "cp2"])
def test_a_layout_computes_what_transformers_does(layout: str, tmp_path: Path) -> None:
    plan = plan_for("cpu", "float32")
    step = step_in_layout(plan, ("", ""), LAYOUTS[layout], "qwen3", tmp_path)
    assert step.tokens > 500


def test_experts_compute_what_transformers_does(tmp_path: Path) -> None:
    plan, sizes = plan_for("cpu", "float32"), EXPERT_LAYOUTS["dp2 ep2"]
    step_in_layout(plan, ("", ""), sizes, "qwen3_moe", tmp_path)


def test_a_layout_agrees_in_sixteen_bits_as_far_as_transformers_does(tmp_path: Path) -> None:
    step = step_in_layout(plan_for("cpu", "bfloat16"), ("", ""), {"tp": 2}, "qwen3", tmp_path)
    assert step.reference_logprob_gap > 1e-4


def test_a_real_server_agrees_before_and_after_an_update(tmp_path: Path) -> None:
    assert max(run_and_judge(plan_for("cpu", "float32"), ("", ""), tmp_path).mean_gaps) < 1e-4

"""A node of eight GPUs: layouts over NCCL, real servers, kills, and the first steps of a recipe.

Writes `benchmarks/results/gpu_node.json`. The model of the recipe must be in the cache:
`areal-hpc prefetch recipes/gpu8_gsm8k_qwen3_0.6b.yaml` where there is a network.
"""

from pathlib import Path

import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, audit_of, said_by
from tests.support.killed_run import KilledRun
from tests.support.node_tier import (
    EXPERT_LAYOUTS,
    KILLS,
    LAYOUTS,
    RECIPE,
    plan_for,
    run_and_judge,
    step_in_layout,
    summarize_run,
)
from tests.support.results import add_results
from tests.support.small_policy import DTypeName
from tests.support.small_run import await_none_left

pytestmark = pytest.mark.timeout(3600)

RUN_TIMEOUT_S = 1800.0
STEPS = 20
ON_GPUS = (
    *("inference.device=cuda", "inference.dtype=bfloat16", "inference.tp=2"),
    *("inference.replicas_per_cell=2", "inference.mem_fraction_static=0.5"),
    *("trainer.device=cuda", "trainer.dtype=bfloat16", "trainer.parallel.dp=2"),
)
"""For the run that is killed, which a CPU's recipe describes."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layout_computes_what_transformers_does(
    layout: str, dtype: DTypeName, gpus: tuple[str, ...], tmp_path: Path
) -> None:
    step = step_in_layout(plan_for("cuda", dtype), gpus, LAYOUTS[layout], "qwen3", tmp_path)
    add_results("gpu_node", **{f"logprob_gap, {layout}, {dtype}": step.logprob_gap})


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_compute_what_transformers_does(
    layout: str, gpus: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = EXPERT_LAYOUTS[layout]
    step = step_in_layout(plan_for("cuda", "float32"), gpus, sizes, "qwen3_moe", tmp_path)
    add_results("gpu_node", **{f"logprob_gap, {layout}": step.logprob_gap})


@pytest.mark.parametrize("tp", [1, 2])
def test_a_real_server_agrees_before_and_after_an_update_over_nccl(
    tp: int, gpus: tuple[str, ...], tmp_path: Path
) -> None:
    found = run_and_judge(plan_for("cuda", "bfloat16", f"inference.tp={tp}"), gpus, tmp_path)
    add_results("gpu_node", **{f"engine_gap, tp {tp}": max(found.mean_gaps)})


def test_a_run_whose_parties_are_killed_completes(tmp_path: Path) -> None:
    model = tmp_path / "model"
    text = "State the final answer to the following: 1 + 2 ="
    make_tiny_model(model, [text], hidden=256, heads=4, kv_heads=2, head_dim=64)
    run = KilledRun(tmp_path, model, KILLS, 24, *ON_GPUS)
    launches = run.run_to_the_end(most_launches=1 + len(KILLS))
    struck = run.struck()
    assert struck.keys() == {kill.name for kill in KILLS}, run.said()
    verdict = run.assert_complete()
    await_none_left(run, 60.0)
    times = {name: run.seconds_to_next_version(at) for name, at in struck.items()}
    add_results("gpu_node", kills={"launches": launches, "audit": verdict, "recovered_s": times})


def test_the_recipe_of_one_node_learns(tmp_path: Path) -> None:
    overrides = (f"cluster.fileroot={tmp_path}", f"trainer.total_steps={STEPS}")
    said_by(areal_hpc("run", RECIPE, *overrides, timeout_s=RUN_TIMEOUT_S))
    paths = RunPaths(tmp_path / "gsm8k" / "qwen3_0.6b")
    found = summarize_run(read_readable_records(paths.metrics))
    add_results("gpu_node", recipe=found)
    audit_of(paths.root)
    assert found["steps"] == STEPS
    assert found["last_reward"] > found["first_reward"], found

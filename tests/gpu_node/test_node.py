"""A node of eight GPUs: layouts over NCCL, real servers, kills, and the first steps of a recipe.

Writes `benchmarks/results/gpu_node.json`. The model of the recipe must be in the cache:
`areal-hpc prefetch recipes/gpu8_gsm8k_qwen3_0.6b.yaml` where there is a network.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.launch.doctor.gpu import TinyRun, build_check_plan, judge_run, run_tiny_recipe
from areal_hpc.launch.doctor.results import CheckStatus
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, audit_of, said_by
from tests.support.environments import CHECKOUT
from tests.support.killed_run import Kill, KilledRun
from tests.support.results import add_results
from tests.support.small_run import SmallRun, await_none_left, started_from

pytestmark = pytest.mark.timeout(3600)

RECIPE = CHECKOUT / "recipes" / "gpu8_gsm8k_qwen3_0.6b.yaml"
RUN_TIMEOUT_S = 1800.0
STEPS = 20
LAYOUTS: Mapping[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp4": {"dp": 4},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
}
"""Of the trainer, beside a server."""
KILLS = [
    *(Kill("server", point) for point in ("episode", "update")),
    *(Kill("trainer", point) for point in ("step", "checkpoint")),
    *(Kill("ledger", "step"), Kill("proxy", "journal"), Kill("driver", "episode")),
]
"""Each party at the points where it holds something."""
UPDATE_PHASES = ("pause_call", "transfer", "load", "verify", "flush", "resume")
COMPARED_ROWS = 5
"""Steps at either end of a run, whose mean rewards are compared."""


ON_GPUS = (
    "inference.mem_fraction_static=0.5",
    *("trainer.device=cuda", "trainer.dtype=bfloat16"),
)
"""For a run that a CPU's recipe describes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of a size that flash attention takes."""
    folder, text = (
        tmp_path_factory.mktemp("model"),
        "State the final answer to the following: 1 + 2 =",
    )
    make_tiny_model(folder, [text], layers=4, hidden=256, heads=4, kv_heads=4, head_dim=64)
    return folder


def judge(run: TinyRun) -> float:
    """The largest mean difference of engine and trainer, which must be rounding."""
    verdict = judge_run(run)
    assert verdict.verdict is CheckStatus.OK, verdict
    return max(run.mean_gaps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_the_server_does(layout: str, model: Path, tmp_path: Path) -> None:
    sizes = (f"trainer.parallel.{name}={size}" for name, size in LAYOUTS[layout].items())
    run = SmallRun(tmp_path, *started_from(model), *ON_GPUS, *sizes, "evaluation.every_steps=0")
    run.finish()
    steps = [row for row in read_readable_records(run.paths.metrics) if "reward/mean" in row]
    gaps, norms = (
        tuple(row[name] for row in steps)
        for name in ("logprob/engine_trainer_mean_abs_diff", "grad_norm")
    )
    add_results("gpu_node", **{f"engine_gap, {layout}": judge(TinyRun("bfloat16", gaps, norms))})


@pytest.mark.parametrize("tp", [1, 2])
def test_a_real_server_agrees_before_and_after_an_update_over_nccl(
    tp: int, gpus: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = load_recipe(RECIPE, (f"inference.tp={tp}",))
    plan = build_check_plan(recipe, SlurmConfig(), "cuda")
    plan = replace(plan, dtype="bfloat16")
    gap = judge(run_tiny_recipe(plan, gpus, tmp_path))
    add_results("gpu_node", **{f"engine_gap, tp {tp}": gap})


def test_a_run_whose_parties_are_killed_completes(model: Path, tmp_path: Path) -> None:
    spread = ("inference.tp=2", "inference.replicas_per_cell=2", "trainer.parallel.dp=2")
    run = KilledRun(tmp_path, model, KILLS, 24, *ON_GPUS, *spread)
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


def summarize_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What a run cost and earned, from its metrics. Pure."""
    steps = [row for row in rows if "reward/mean" in row]
    rewards = [float(row["reward/mean"]) for row in steps]

    def median(key: str) -> float:
        values = [float(row[key]) for row in steps if key in row]
        return statistics.median(values) if values else 0.0

    return {
        "steps": float(len(steps)),
        "first_reward": statistics.mean(rewards[:COMPARED_ROWS]),
        "last_reward": statistics.mean(rewards[-COMPARED_ROWS:]),
        "step_s": median("time/step_s"),
        "train_s": median("time/train_s"),
        "tokens_per_s": median("throughput/wall_tokens_per_s"),
        "update_s": sum(median(f"weights/{phase}_s") for phase in UPDATE_PHASES),
        "checkpoint_s": median("time/checkpoint_s"),
        "largest_logprob_gap": max(
            float(row.get("logprob/engine_trainer_max_abs_diff", 0.0)) for row in steps
        ),
    }

"""What a node of GPUs is asked to do, on any device: layouts, servers, kills, a recipe."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.launch.doctor.checks import CheckResult, CheckStatus
from areal_hpc.launch.doctor.gpu.check_plan import build_check_plan
from areal_hpc.launch.doctor.gpu.measured_steps import (
    compare_step_with_transformers,
    start_and_compare_engine_with_trainer,
)
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan
from areal_hpc.launch.doctor.gpu.step_judgments import judge_engine, judge_step
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.trainer.self_test.messages import Device, DTypeName, EngineComparison, StepComparison
from tests.support.environments import CHECKOUT
from tests.support.killed_run import Kill
from tests.support.parity_table import MIXTURE
from tests.support.reference_models import hf_model

RECIPE = CHECKOUT / "recipes" / "gpu8_gsm8k_qwen3_0.6b.yaml"
LAYOUTS: Mapping[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp8": {"dp": 8},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
    "tp2 cp2 dp2": {"tp": 2, "cp": 2, "dp": 2},
}
"""Of dense models, on up to eight GPUs."""
EXPERT_LAYOUTS: Mapping[str, dict[str, int]] = {
    "dp2 ep2": {"dp": 2, "ep": 2},
    "tp2 dp2 ep4": {"tp": 2, "dp": 2, "ep": 4},
}
KILLS = [
    *(Kill("server", point) for point in ("episode", "update")),
    *(Kill("trainer", point) for point in ("step", "checkpoint")),
    *(Kill("ledger", "step"), Kill("proxy", "journal"), Kill("driver", "episode")),
]
"""Each party at the points where it holds something."""
UPDATE_PHASES = ("pause_call", "transfer", "load", "verify", "flush", "resume")
COMPARED_ROWS = 5
"""Steps at either end of a run, whose mean rewards are compared."""


def plan_for(device: Device, dtype: DTypeName, *overrides: str) -> GpuCheckPlan:
    """The recipe of one node, examined on a device."""
    recipe = load_recipe(RECIPE, overrides)
    plan = build_check_plan(recipe, SlurmConfig(), device, 0)
    return msgspec.structs.replace(plan, trainer_dtype=dtype)


def write_model(family: str, folder: Path) -> Path:
    """A small random model; a dense one has heads of a size that flash attention takes."""
    if family == MIXTURE:
        hf_model(family).save_pretrained(folder)
        return folder
    make_tiny_model(
        folder,
        ["one two three four"],
        layers=4, hidden=512, heads=8, kv_heads=4, head_dim=64, ffn=1024, vocab=384,
    )  # fmt: skip
    return folder


def step_in_layout(
    plan: GpuCheckPlan, gpus: Sequence[str], sizes: Mapping[str, int], family: str, folder: Path
) -> StepComparison:
    """A step of a layout beside transformers, which must agree."""
    model_dir = write_model(family, folder / "model")
    parallel = ParallelConfig.model_validate(sizes)
    step = compare_step_with_transformers(
        plan, gpus, folder / "ranks", parallel=parallel, model_dir=model_dir
    )
    verdict = judge_step(step)
    assert verdict.verdict is CheckStatus.OK, verdict
    return step


def serve_and_update(plan: GpuCheckPlan, gpus: Sequence[str], folder: Path) -> EngineComparison:
    """Start a replica, compare it with the trainer, and broadcast new weights into it."""
    engine = start_and_compare_engine_with_trainer(plan, gpus, folder)
    verdicts: list[CheckResult] = judge_engine(engine)
    assert {one.verdict for one in verdicts} == {CheckStatus.OK}, verdicts
    return engine


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

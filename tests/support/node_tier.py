"""What a node of GPUs is asked to do, on any device: layouts, servers, kills, a recipe."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.launch.doctor.checks import CheckStatus
from areal_hpc.launch.doctor.gpu.judgments import judge_run
from areal_hpc.launch.doctor.gpu.plan import Device, GpuCheckPlan, build_check_plan
from areal_hpc.launch.doctor.gpu.steps import TinyRun, run_ranks, run_tiny_recipe
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.recipe.sections.trainer import ParallelConfig
from tests.support.environments import CHECKOUT
from tests.support.killed_run import Kill
from tests.support.layouts import MIXTURE
from tests.support.reference_models import hf_model
from tests.support.small_policy import DTypeName
from tests.support.step_beside_transformers import StepComparison, StepRequest

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
    parallel = ParallelConfig.model_validate(sizes)
    request = StepRequest(
        device=plan.device,
        dtype=plan.trainer_dtype,
        model_dir=str(write_model(family, folder / "model")),
        rendezvous_dir=str(folder / "stores"),
        report=str(folder / "step.json"),
        parallel=parallel.model_dump(),
    )
    request_file = folder / "request.json"
    request_file.write_bytes(msgspec.json.encode(request))
    module = "tests.support.step_beside_transformers"
    run_ranks(plan, module, request_file, gpus[: parallel.world_size])
    step = msgspec.json.decode(Path(request.report).read_bytes(), type=StepComparison)
    step.assert_off_by_rounding()
    return step


def run_and_judge(plan: GpuCheckPlan, gpus: Sequence[str], folder: Path) -> TinyRun:
    """A run of two steps, in which SGLang agrees with the trainer before and after an update."""
    found = run_tiny_recipe(plan, gpus, folder)
    verdict = judge_run(found)
    assert verdict.verdict is CheckStatus.OK, verdict
    return found


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

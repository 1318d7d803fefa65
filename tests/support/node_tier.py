"""What a node of GPUs is asked to do, on any device: layouts, servers, kills, a recipe."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.launch.doctor.gpu.collectives import run_ranks
from areal_hpc.launch.doctor.gpu.plan import Device, build_check_plan
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, said_by
from tests.support.environments import CHECKOUT
from tests.support.killed_run import Kill
from tests.support.parity_table import MIXTURE
from tests.support.reference_models import hf_model
from tests.support.small_policy import DTypeName
from tests.support.small_run import CUT_DOWN
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
DEVICE_KEYS = ("device", "dtype")
MAX_ENGINE_GAP_BY_DTYPE = {"float32": 1e-3, "bfloat16": 0.03}
"""Mean difference between engine and trainer that is rounding. No GPU has confirmed them."""
RUN_TIMEOUT_S = 1200.0
COMPARED_ROWS = 5
"""Steps at either end of a run, whose mean rewards are compared."""


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
    device: Device,
    dtype: DTypeName,
    gpus: Sequence[str],
    sizes: Mapping[str, int],
    family: str,
    folder: Path,
) -> StepComparison:
    """A step of a layout beside transformers, which must agree."""
    plan = build_check_plan(load_recipe(RECIPE), SlurmConfig(), device, 0)
    parallel = ParallelConfig.model_validate(sizes)
    request = StepRequest(
        device=device,
        dtype=dtype,
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


def run_and_compare_engine(
    device: Device, dtype: DTypeName, folder: Path, *overrides: str
) -> list[float]:
    """The quick start cut down, and by step how far SGLang's log-probabilities are off.

    The second step is sampled from weights that an update brought.
    """
    devices = (f"{part}.{key}" for part in ("trainer", "inference") for key in DEVICE_KEYS)
    values = (device, dtype, device, dtype)
    words = [f"{name}={value}" for name, value in zip(devices, values, strict=True)]
    words += [*CUT_DOWN, "trainer.total_steps=2", f"cluster.fileroot={folder}", *overrides]
    said_by(areal_hpc("run", "recipes/quickstart.yaml", *words, timeout_s=RUN_TIMEOUT_S))
    rows = read_readable_records(RunPaths(folder / "quickstart" / "demo").metrics)
    steps = [row for row in rows if "reward/mean" in row]
    assert all(row["grad_norm"] > 0 for row in steps)
    gaps = [float(row["logprob/engine_trainer_mean_abs_diff"]) for row in steps]
    assert len(gaps) == 2
    assert max(gaps) <= MAX_ENGINE_GAP_BY_DTYPE[dtype]
    return gaps


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

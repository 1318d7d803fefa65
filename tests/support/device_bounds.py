"""What `device_worker` must find, on any device."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

VALUE_BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}
GRADIENT_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Rounding to 8 bits is 2**-9 = 0.2 % a time."""

Findings = dict[str, Any]


def run_worker(device: str, report: Path) -> Findings:
    """What the worker found, in a process of its own."""
    _run([sys.executable, "-m", "tests.gpu.device_worker", device, str(report)], device)
    found: Findings = json.loads(report.read_text())
    return found


def run_benchmarks(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the benchmarks with small sizes; what each wrote."""
    written = {}
    sizes = ["--rows", "4", "--length", "32", "--max-tokens", "128"]
    for name, more in (("trainer", sizes), ("codec", [])):
        out = folder / f"{name}.json"
        command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--tiny", "--pairs", "1"]
        _run([*command, "--device", device, "--out", str(out), *more], device)
        written[name] = json.loads(out.read_text())
    return written


def _run(command: list[str], device: str) -> None:
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    if device == "cpu":
        environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(command, cwd=CHECKOUT, env=environ, check=True, timeout=scaled(540))


def attention_is_plain_attention(found: Findings) -> None:
    assert len(found["attention"]) == 6
    for case, gaps in found["attention"].items():
        dtype = case.split(",")[0]
        assert gaps["value"] <= VALUE_BOUNDS[dtype], case
        assert gaps["gradient"] <= GRADIENT_BOUNDS[dtype], case


def experts_are_those_of_a_loop(found: Findings) -> None:
    for dtype, gaps in found["experts"].items():
        assert gaps["value"] <= GRADIENT_BOUNDS[dtype], dtype
        assert gaps["gradient"] <= GRADIENT_BOUNDS[dtype], dtype
        assert gaps["gradient_without_tokens"] == 0, dtype


def logprobs_are_those_of_a_log_softmax(found: Findings) -> None:
    for dtype, gaps in found["logprobs"].items():
        assert gaps["value"] <= 1e-4, dtype  # float32 inside, whatever the logits are
        assert gaps["gradient"] <= GRADIENT_BOUNDS[dtype], dtype


def the_trainer_agrees_with_transformers(found: Findings) -> None:
    exact, rounded = found["parity"]["float32"], found["parity"]["bfloat16"]
    assert exact["micro_batches"] > 1
    assert exact["logprob"] <= 1e-4
    assert exact["gradient"] <= 1e-4
    # In 16 bits nobody is exact: ours may err as much as transformers does, and a half more.
    assert rounded["logprob"] <= 1.5 * rounded["logprob_of_transformers"]
    assert rounded["gradient"] <= 1.5 * rounded["gradient_of_transformers"]


def steps_follow_the_advantages(found: Findings) -> None:
    learned = found["learning"]
    assert all(map(math.isfinite, learned["losses"]))
    assert learned["rise"] > 0
    assert learned["main_weight_dtype"] == learned["gradient_dtype"] == "torch.float32"


def an_optimizer_on_the_host_steps_with_the_same_bits(found: Findings) -> None:
    for dtype, state_bytes in (("float32", 8), ("bfloat16", 12)):
        offload = found["offload"][dtype]
        assert offload["different"] == 0, dtype
        assert offload["host_bytes"] >= state_bytes * offload["parameters"], dtype
        assert offload["is_pinned"], dtype


def buckets_carry_every_bit(found: Findings) -> None:
    codec = found["learning"]["codec"]
    assert codec["buckets"] >= 1
    assert codec["different"] == 0


def benchmarks_tell_their_figures(written: dict[str, dict[str, Any]]) -> None:
    trainer, codec = written["trainer"], written["codec"]
    for kind in ("unpadded", "padded", "padded_third_scored"):
        assert trainer[f"tokens_per_s_{kind}"] > 0
        assert trainer[f"over_hf_{kind}"] > 0
    assert trainer["mfu"] > 0
    assert codec["pack_over_copy"] > 0
    assert codec["check_bytes_per_s"] > 0


CHECKS = (
    attention_is_plain_attention,
    experts_are_those_of_a_loop,
    logprobs_are_those_of_a_log_softmax,
    the_trainer_agrees_with_transformers,
    steps_follow_the_advantages,
    an_optimizer_on_the_host_steps_with_the_same_bits,
    buckets_carry_every_bit,
)

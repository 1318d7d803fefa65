"""The trainer on a GPU: flash attention, bfloat16, NCCL, the sizes of Qwen2.5-0.5B."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import Device, RunWorker

pytestmark = pytest.mark.timeout(600)
VALUE_BOUNDS = {"float32": 1e-4, "bfloat16": 3e-2}
GRADIENT_BOUNDS = {"float32": 1e-4, "bfloat16": 2e-2}
"""Rounding to 8 bits is 2**-9 = 0.2 % a time."""
Findings = dict[str, Any]


@pytest.fixture(scope="module")
def findings(
    run_worker: RunWorker, device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Findings:
    report = tmp_path_factory.mktemp("device") / "report.json"
    return run_worker(report, "tests.gpu.device_worker", device, str(report))


def test_attention_is_plain_attention(findings: Findings) -> None:
    assert len(findings["attention"]) == 6
    for case, gaps in findings["attention"].items():
        dtype = case.split(",")[0]
        assert gaps["value"] <= VALUE_BOUNDS[dtype], case
        assert gaps["gradient"] <= GRADIENT_BOUNDS[dtype], case


def test_experts_are_those_of_a_loop(findings: Findings) -> None:
    for dtype, gaps in findings["experts"].items():
        assert gaps["value"] <= GRADIENT_BOUNDS[dtype], dtype
        assert gaps["gradient"] <= GRADIENT_BOUNDS[dtype], dtype
        assert gaps["gradient_without_tokens"] == 0, dtype


def test_logprobs_are_those_of_a_log_softmax(findings: Findings) -> None:
    for dtype, gaps in findings["logprobs"].items():
        assert gaps["value"] <= 1e-4, dtype  # float32 inside, whatever the logits are
        assert gaps["gradient"] <= GRADIENT_BOUNDS[dtype], dtype


def test_the_trainer_agrees_with_transformers(findings: Findings) -> None:
    exact, rounded = findings["parity"]["float32"], findings["parity"]["bfloat16"]
    assert exact["micro_batches"] > 1
    assert exact["logprob"] <= 1e-4
    assert exact["gradient"] <= 1e-4
    # In 16 bits neither is exact: our error may be 1.5 times that of transformers.
    assert rounded["logprob"] <= 1.5 * rounded["logprob_of_transformers"]
    assert rounded["gradient"] <= 1.5 * rounded["gradient_of_transformers"]


def test_steps_follow_the_advantages(findings: Findings) -> None:
    learned = findings["learning"]
    assert all(map(math.isfinite, learned["losses"]))
    assert learned["rise"] > 0
    assert learned["main_weight_dtype"] == learned["gradient_dtype"] == "torch.float32"


def test_an_optimizer_on_the_host_steps_with_the_same_bits(findings: Findings) -> None:
    for dtype, state_bytes in (("float32", 8), ("bfloat16", 12)):
        offload = findings["offload"][dtype]
        assert offload["different"] == 0, dtype
        assert offload["host_bytes"] >= state_bytes * offload["parameters"], dtype
        assert offload["is_pinned"], dtype


def test_buckets_carry_every_bit(findings: Findings) -> None:
    codec = findings["learning"]["codec"]
    assert codec["buckets"] >= 1
    assert codec["different"] == 0


def test_no_float32_copy_of_the_logits_is_ever_made(findings: Findings) -> None:
    kept = findings["logprobs"]["bfloat16"]
    assert kept["extra_bytes"] < kept["float32_copy_bytes"] / 4


def test_the_benchmarks_tell_their_figures(
    run_worker: RunWorker, device: Device, tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    small = ("--tiny", "--pairs", "1", "--device", device, "--out", str(out))
    sizes = ("--rows", "4", "--length", "32", "--max-tokens", "128")
    trainer = run_worker(out, "benchmarks.gpu.trainer", *small, *sizes)
    for kind in ("unpadded", "padded", "padded_third_scored"):
        assert trainer[f"tokens_per_s_{kind}"] > 0
        assert trainer[f"over_hf_{kind}"] > 0
    assert trainer["mfu"] > 0
    codec = run_worker(out, "benchmarks.gpu.codec", *small)
    assert codec["pack_over_copy"] > 0

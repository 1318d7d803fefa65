"""Settings of the tier that needs a CUDA device; without one it fails. `make test` leaves it out.

`tests/acceptance/test_small_benchmarks.py` runs it on the CPU, small: `GPU_TIER_DEVICE=cpu`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

Device = Literal["cpu", "cuda"]
RunWorker = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session", autouse=True)
def device() -> Device:
    if os.environ.get("GPU_TIER_DEVICE") == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail(
            f"tests/gpu needs a CUDA device and a PyTorch built for CUDA; PyTorch "
            f"{torch.__version__} sees none. Run `make gpu` on a machine that has one."
        )
    return "cuda"


@pytest.fixture(scope="session")
def run_worker(device: Device) -> RunWorker:
    """Run a module in a process of its own, and return its report."""

    def run(report: Path, module: str, *arguments: str) -> dict[str, Any]:
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        if device == "cpu":
            environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
        command = [sys.executable, "-m", module, *arguments]
        subprocess.run(command, cwd=CHECKOUT, env=environ, check=True, timeout=scaled(540))
        findings: dict[str, Any] = json.loads(report.read_text())
        print(json.dumps(findings, indent=1))
        return findings

    return run

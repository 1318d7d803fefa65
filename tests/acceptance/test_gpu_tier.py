"""The GPU tier's own code, run on the CPU with small sizes: only the device differs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT


@pytest.mark.timeout(1500)
def test_the_gpu_tier_passes_on_the_cpu() -> None:
    environ = {**os.environ, "GPU_TIER_DEVICE": "cpu"}
    command = (sys.executable, "-m", "pytest", "-q", "tests/gpu")
    assert " passed" in said_by(run_program(*command, environ=environ, timeout_s=1400))


def test_the_gpu_tier_says_what_it_misses(tmp_path: Path) -> None:
    python = f"{CHECKOUT}/.venvs/main/bin/python"
    ended = subprocess.run(
        [CHECKOUT / "benchmarks/gpu/run.sh"],
        env={**os.environ, "PYTHON": python, "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert ended.returncode != 0
    assert "sees no CUDA device" in ended.stderr

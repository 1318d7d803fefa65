"""The GPU tier's own code, run on the CPU with small sizes: only the device differs."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.device_bounds import (
    CHECKS,
    Findings,
    benchmarks_tell_their_figures,
    run_benchmarks,
    run_worker,
)
from tests.support.environments import CHECKOUT

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return run_worker("cpu", tmp_path_factory.mktemp("device") / "report.json")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_cpu(check: Callable[[Findings], None], findings: Findings) -> None:
    check(findings)


def test_the_gpu_benchmarks_run_on_the_cpu_too(tmp_path: Path) -> None:
    benchmarks_tell_their_figures(run_benchmarks("cpu", tmp_path))


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

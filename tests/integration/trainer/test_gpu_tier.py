"""The GPU tier's own code, run on the CPU with small sizes: only the device differs."""

import json
import os
import subprocess
import sys
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


def figures(cwd: Path, folder: Path, *command: str) -> dict[str, float]:
    """What a small benchmark prints last, which is part of what it writes."""
    out = folder / "figures.json"
    sizes = ("--hidden", "128", "--layers", "1", "--out", str(out))
    ended = subprocess.run(
        [*command, *sizes], cwd=cwd, capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    printed: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    assert printed.items() <= json.loads(out.read_text()).items()
    return printed


def test_the_trainer_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    areal_hpc = f"{CHECKOUT}/.venvs/agents/bin/areal-hpc"
    rows = ("--vocab", "256", "--rows", "3", "--length", "40", "--pairs", "2")
    found = figures(tmp_path, tmp_path, areal_hpc, "bench", "trainer", *rows)
    assert found["over_hf_unpadded"] > 0
    assert found["over_hf_padded"] > 0
    assert found["mean_loss_gap"] < 1e-4
    assert found["places_over_tokens"] > 1


def test_the_checkpoint_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    rounds = ("--vocab", "512", "--rounds", "1", "--step-s", "0.001", "--folder", str(tmp_path))
    found = figures(CHECKOUT, tmp_path, sys.executable, "-m", "benchmarks.checkpoint", *rounds)
    assert {"stall_s", "step_s", "stall_over_step", "in_process_s"} <= set(found)
    assert found["state_bytes"] > 1e6


def test_the_gpu_tier_says_what_it_misses(tmp_path: Path) -> None:
    python = f"{CHECKOUT}/.venvs/train/bin/python"
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

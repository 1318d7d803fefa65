"""The GPU tier's own code, run on the CPU with small sizes: only the device differs."""

from __future__ import annotations

import json
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
    report = tmp_path_factory.mktemp("device") / "report.json"
    run_worker("cpu", report)
    found: Findings = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_the_cpu(check: Callable[[Findings], None], findings: Findings) -> None:
    check(findings)


def test_the_gpu_benchmarks_run_on_the_cpu_too(tmp_path: Path) -> None:
    benchmarks_tell_their_figures(run_benchmarks("cpu", tmp_path))


def test_the_trainer_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "trainer.json"
    sizes = ["--pairs", "2", "--hidden", "128", "--layers", "1", "--vocab", "256"]
    ended = subprocess.run(
        [
            *(f"{CHECKOUT}/.venvs/agents/bin/areal-hpc", "bench", "trainer", *sizes),
            *("--rows", "3", "--length", "40", "--out", str(out)),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    last = json.loads(ended.stdout.splitlines()[-1])
    assert last["over_hf_unpadded"] > 0
    assert last["over_hf_padded"] > 0
    assert last["mean_loss_gap"] < 1e-4
    assert last["places_over_tokens"] > 1
    assert last.items() <= json.loads(out.read_text()).items()


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

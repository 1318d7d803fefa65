"""Small benchmarks and the GPU tier's own code with small sizes: only the device differs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import areal_hpc, run_program, said_by
from tests.support.environments import CHECKOUT


def figures(folder: Path, *command: str) -> dict[str, float]:
    """Run a small benchmark; its last line is part of the file that it writes."""
    out = folder / "figures.json"
    sizes = ("--hidden", "128", "--layers", "1", "--out", out)
    output = said_by(run_program(*command, *sizes, timeout_s=200))
    printed: dict[str, float] = json.loads(output.splitlines()[-1])
    assert printed.items() <= json.loads(out.read_text()).items()
    return printed


def test_the_trainer_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    rows = ("--vocab", "256", "--rows", "3", "--length", "40", "--pairs", "2")
    results = figures(tmp_path, f"{CHECKOUT}/.venvs/main/bin/areal-hpc", "bench", "trainer", *rows)
    assert min(results["over_hf_unpadded"], results["over_hf_padded"]) > 0
    assert results["mean_loss_gap"] < 1e-4 < 1 < results["places_over_tokens"]


def test_the_checkpoint_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    rounds = ("--vocab", "512", "--rounds", "1", "--step-s", "0.001", "--folder", str(tmp_path))
    results = figures(tmp_path, sys.executable, "-m", "benchmarks.checkpoint", *rounds)
    assert {"stall_s", "step_s", "stall_over_step", "in_process_s"} <= set(results)
    assert results["state_bytes"] > 1e6


@pytest.mark.timeout(500)
def test_the_telemetry_benchmark_ends_with_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = (sys.executable, "-m", "benchmarks.telemetry", "--pairs", "1", "--steps", "2")
    said_by(run_program(*command, "--out", out, timeout_s=400))
    results = json.loads(out.read_text())
    assert min(results["cpu_with_over_without"], results["wall_with_over_without"]) > 0


@pytest.mark.parametrize(
    ("name", "few", "keys"),
    [
        (
            "shards",
            ("--pairs", "1", "--trajectories", "8"),
            [
                *("seal_over_raw", "read_over_raw"),
                *("group_layout_cpu_over_ours_write", "group_layout_cpu_over_ours_read"),
            ],
        ),
        (
            "weights",
            ("--gib", "0.01", "--bucket-mib", "1", "--pairs", "1", "--updates", "0"),
            ["broadcast_over_bare"],
        ),
        (
            "packing",
            ("--pairs", "1", "--trajectories", "8"),
            [
                *("pack_s", "advantage_s", "padding_waste"),
                *("areal_over_ours_pack", "areal_over_ours_advantage"),
            ],
        ),
        (
            "sandbox",
            (
                *("--rounds", "1", "--commands", "2", "--many", "2"),
                *("--pairs", "1", "--calls", "2", "--reply-s", "0.01"),
            ),
            ["cold_start_ms", "warm_start_ms", "command_ms", "many_start_ms", "calls_ratio"],
        ),
        (
            "proxy",
            ("--rounds", "1", "--share", "0.01", "--no-litellm"),  # it would be installed
            [
                *("cpu_us_1k", "cpu_us_8k", "floor_cpu_us_1k", "added_p50_ms_c1"),
                *("turn64_over_turn2", "requests_per_s_core_1k"),
            ],
        ),
    ],
)
def test_the_benchmark_ends_with_its_figures(
    name: str, few: tuple[str, ...], keys: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    output = said_by(areal_hpc("bench", name, *few, "--out", out))
    figures = json.loads(output.splitlines()[-1])
    assert figures.keys() >= {*keys}
    assert all(isinstance(value, float) for value in figures.values())
    # Latencies that are added are differences of measured ones.
    assert all(value >= 0 for key, value in figures.items() if not key.startswith("added_"))
    assert json.loads(out.read_text()).items() >= figures.items()


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

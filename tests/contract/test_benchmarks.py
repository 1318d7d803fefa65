"""Benchmarks run, and their last line is what others read."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.environments import CHECKOUT


@pytest.mark.parametrize(
    ("name", "few", "keys"),
    [
        (
            "shards",
            ("--pairs", "1", "--trajectories", "8"),
            {
                "seal_over_raw",
                "read_over_raw",
                "group_layout_cpu_over_ours_write",
                "group_layout_cpu_over_ours_read",
            },
        ),
        (
            "packing",
            ("--pairs", "1", "--trajectories", "8"),
            {
                "pack_s",
                "advantage_s",
                "padding_waste",
                "areal_over_ours_pack",
                "areal_over_ours_advantage",
            },
        ),
        (
            "weights",
            ("--gib", "0.01", "--bucket-mib", "1", "--pairs", "1", "--updates", "0"),
            {"broadcast_over_bare"},
        ),
        (
            "proxy",
            ("--rounds", "1", "--share", "0.01", "--no-litellm"),  # it would be installed
            {
                "cpu_us_1k",
                "cpu_us_8k",
                "floor_cpu_us_1k",
                "added_p50_ms_c1",
                "turn64_over_turn2",
                "requests_per_s_core_1k",
            },
        ),
    ],
)
def test_the_last_line_of_a_benchmark_is_one_json_object_of_its_figures(
    name: str, few: Sequence[str], keys: set[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    arguments = [*few, "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "bench", name, *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert keys <= set(figures)
    assert all(isinstance(value, float) for value in figures.values())
    # Latencies that are added are differences of measured ones.
    assert all(value >= 0 for key, value in figures.items() if not key.startswith("added_"))
    assert json.loads(out.read_text()).items() >= figures.items()

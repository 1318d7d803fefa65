"""Benchmarks run, and their last line is what others read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "shards",
            {
                "seal_over_raw",
                "read_over_raw",
                "group_layout_cpu_over_ours_write",
                "group_layout_cpu_over_ours_read",
            },
        ),
        (
            "packing",
            {
                "pack_s",
                "advantage_s",
                "padding_waste",
                "areal_over_ours_pack",
                "areal_over_ours_advantage",
            },
        ),
    ],
)
def test_the_last_line_of_a_benchmark_is_one_json_object_of_its_figures(
    name: str, keys: set[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    arguments = ["--pairs", "1", "--trajectories", "8", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "bench", name, *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    assert keys <= set(figures)
    assert all(isinstance(value, float) and value >= 0 for value in figures.values())
    assert json.loads(out.read_text()).items() >= figures.items()

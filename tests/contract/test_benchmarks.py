"""Benchmarks run, and their last line is what others read."""

import json
from pathlib import Path

import pytest

from tests.support.commands import areal_hpc, said_by

FEW = ("--pairs", "1", "--trajectories", "8")
GROUP_LAYOUT = "group_layout_cpu_over_ours"


@pytest.mark.parametrize(
    ("name", "few", "keys"),
    [
        (
            "shards",
            FEW,
            ["seal_over_raw", "read_over_raw", f"{GROUP_LAYOUT}_write", f"{GROUP_LAYOUT}_read"],
        ),
        (
            "packing",
            FEW,
            [
                *("pack_s", "advantage_s", "padding_waste"),
                *("areal_over_ours_pack", "areal_over_ours_advantage"),
            ],
        ),
        (
            "weights",
            ("--gib", "0.01", "--bucket-mib", "1", "--pairs", "1", "--updates", "0"),
            ["broadcast_over_bare"],
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
def test_the_last_line_of_a_benchmark_is_one_json_object_of_its_figures(
    name: str, few: tuple[str, ...], keys: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    said = said_by(areal_hpc("bench", name, *few, "--out", out))
    figures = json.loads(said.splitlines()[-1])
    assert figures.keys() >= {*keys}
    assert all(isinstance(value, float) for value in figures.values())
    # Latencies that are added are differences of measured ones.
    assert all(value >= 0 for key, value in figures.items() if not key.startswith("added_"))
    assert json.loads(out.read_text()).items() >= figures.items()

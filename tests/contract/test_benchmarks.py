"""Benchmarks run, and their last line is what others read. The longer ones: `acceptance`."""

from pathlib import Path

import pytest

from tests.support.benchmark_figures import check_benchmark_figures

GROUP_LAYOUT = "group_layout_cpu_over_ours"


@pytest.mark.parametrize(
    ("name", "few", "keys"),
    [
        (
            "shards",
            ("--pairs", "1", "--trajectories", "8"),
            ["seal_over_raw", "read_over_raw", f"{GROUP_LAYOUT}_write", f"{GROUP_LAYOUT}_read"],
        ),
        pytest.param(
            "weights",
            ("--gib", "0.01", "--bucket-mib", "1", "--pairs", "1", "--updates", "0"),
            ["broadcast_over_bare"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_the_last_line_of_a_benchmark_is_one_json_object_of_its_figures(
    name: str, few: tuple[str, ...], keys: list[str], tmp_path: Path
) -> None:
    check_benchmark_figures(name, few, keys, tmp_path)

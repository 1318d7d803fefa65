from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view import shard_report as report
from areal_hpc.view.transcripts.row_search import FoundRow, RowQuery, find_rows
from tests.support.sample_trajectories import seal_in, ticket


def find(path: Path, number: int) -> FoundRow:
    (row,), _ = find_rows(path, RowQuery(row_number=number))
    return row


@pytest.fixture
def paths(paths: RunPaths) -> RunPaths:
    """A run with two shards, of three tickets."""
    seal_in(paths, [*ticket(1), *ticket(2)])
    seal_in(paths, ticket(3))
    return paths


def test_the_list_has_a_line_per_shard_and_a_total(paths: RunPaths) -> None:
    head, first, second, total = report.format_shard_table(paths).splitlines()
    assert head.split()[:5] == ["shard", "kinds", "rows", "tokens", "tickets"]
    sizes = [["train", "4", "24", "2", "0.01"], ["train", "2", "12", "1", "0.01"]]
    assert first.split() == ["cell-0-000000.h5", *sizes[0], "1.1..1.2", "0.500"]
    assert second.split() == ["cell-0-000001.h5", *sizes[1], "1.3", "0.500"]
    assert total == "2 shards, 6 rows, 36 tokens, 0.0 MiB"


def test_a_trajectory_is_shown_token_by_token(paths: RunPaths) -> None:
    title, head, *lines = report.format_tokens(find(paths.root, 5)).splitlines()
    assert title.startswith("cell-0-000001.h5 row 1: ticket 3 attempt 1 episode 1 row 0, reward 1,")
    assert title.endswith("6 tokens, 3 sampled")
    assert head.split() == ["position", "id", "mask", "logprob", "version"]
    assert lines[0].split() == ["0", "3100", "0", "-", "-"]
    assert lines[5].split() == ["5", "3105", "1", "-1.2500", "1.3"]
    of_the_file = report.format_tokens(find(paths.shards_dir / "cell-0-000001.h5", 0))
    assert of_the_file.startswith("cell-0-000001.h5 row 0: ticket 3 attempt 1 episode 0")


@pytest.mark.parametrize("row", [-1, 6])
def test_a_row_that_does_not_exist_is_an_error_with_the_range(paths: RunPaths, row: int) -> None:
    with pytest.raises(RecipeError, match="give a row from 0 to 5"):
        find(paths.root, row)

"""Who waits for a job that has a new number waits for that one, and for nothing else anew."""

import pytest

from areal_hpc.slurm.script_submission import rewrite_dependency


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("afterok:12", "afterok:99"),
        ("afterok:120,afterany:12", "afterok:120,afterany:12"),
        ("afterok:7,afterok:12", "afterok:7,afterok:99"),
        ("afternotok:12,afterok:12", "afternotok:12,afterok:99"),
        ("", ""),
    ],
)
def test_only_the_old_number_of_a_dependency_changes(before: str, after: str) -> None:
    assert rewrite_dependency(before, "12", "99") == after

"""Who waits for a job that has a new number waits for that one, and for nothing else anew."""

import pytest

from areal_hpc.slurm.resubmit import rewrite_dependency


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("afterok:12", "afterok:99"),
        ("afterok:120,afterany:12", "afterok:120,afterany:12"),
        ("afterok:7,afterok:12", "afterok:7,afterok:99"),
        ("afterok:12_*", "afterok:12_*"),
        ("", ""),
    ],
)
def test_only_the_old_number_of_a_dependency_changes(before: str, after: str) -> None:
    assert rewrite_dependency(before, "12", "99") == after


@pytest.mark.parametrize(
    ("before", "waiting_id", "after"),
    [
        ("aftercorr:12_*", "40_1", "afterok:99_1"),
        ("aftercorr:12_*", "40_2", "aftercorr:12_*"),
        ("aftercorr:12_*", "41", "aftercorr:12_*"),
        ("afterok:12_1", "41", "afterok:99_1"),
        ("afterok:12_2", "41", "afterok:12_2"),
        ("afterok:12_*", "41", "afterok:12_0,afterok:12_2,afterok:99_1"),
        ("afterok:7,afterok:12_*", "40_2", "afterok:7,afterok:12_0,afterok:12_2,afterok:99_1"),
    ],
)
def test_array_members_keep_their_index(before: str, waiting_id: str, after: str) -> None:
    others = ("12_0", "12_2")
    changed = rewrite_dependency(before, "12_1", "99_1", waiting_id=waiting_id, other_tasks=others)
    assert changed == after

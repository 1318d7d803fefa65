"""Fifty repair tasks: their solutions earn 1.0, doing nothing earns 0.0."""

from pathlib import Path

import pytest

from tests.support.commands import areal_hpc

pytestmark = pytest.mark.timeout(900)


def test_fifty_tasks_tell_their_solutions_from_nothing(tmp_path: Path) -> None:
    made = areal_hpc("make-repair-tasks", tmp_path / "tasks", "--count", 50)
    assert made.returncode == 0, made.stderr
    checked = areal_hpc("check-tasks", tmp_path / "tasks")
    assert checked.returncode == 0, checked.stdout
    *tasks, summary = checked.stdout.splitlines()
    assert summary.startswith("50 tasks, 0 whose tests")
    assert len(tasks) == 50
    assert all(line.split()[1:] == ["solution", "1", "nothing", "0"] for line in tasks), tasks

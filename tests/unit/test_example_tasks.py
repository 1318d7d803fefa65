"""What the examples teach a model before it learns: right, and in the form of the gym."""

import subprocess
from pathlib import Path

import pytest

from areal_hpc.dataset.harbor.task_folder import read_task_folders
from examples.harbor import sums


@pytest.mark.parametrize("p_reckon", [0.0, 1.0])
def test_both_commands_of_the_demonstrations_write_the_sum(p_reckon: float, tmp_path: Path) -> None:
    for one in sums.demonstrations(5, 1, p_reckon):
        asked, said = (message["content"] for message in one["messages"])
        subprocess.run(["/bin/sh", "-c", said], cwd=tmp_path, check=True)
        wanted = sums.add_up(asked.removeprefix("Write ").removesuffix(" into sum.txt."))
        assert (tmp_path / "sum.txt").read_text() == f"{wanted}\n"
        assert ("$((" in said) == (p_reckon == 1.0)


def test_tasks_of_sums_are_harbors_and_no_sum_comes_twice(tmp_path: Path) -> None:
    sums.write_tasks(tmp_path, 20, 1)
    rows = read_task_folders(tmp_path, "harbor")
    assert len({row["messages"][0]["content"] for row in rows}) == 20

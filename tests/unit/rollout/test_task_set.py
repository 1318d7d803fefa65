"""Task files are the user's: what is wrong in them is named."""

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.rollout.task_set import TaskSet


@pytest.mark.parametrize(
    ("text", "index", "complaint"),
    [
        ('{"question": 1}\n{"question": \n', 1, "tasks.jsonl:2 is not JSON"),
        ("[1]\n", 0, "tasks.jsonl:1 is not a JSON object"),
        ('{"a": 1}\n', -1, "tasks.jsonl has 1 tasks"),
        ('{"a": 1}\n', 1, "tasks.jsonl has 1 tasks"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, index: int, complaint: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(RecipeError, match=complaint):
        TaskSet.read_or_empty(path)[index]


def test_tasks_are_fresh_copies_and_no_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": [1]}\n{"a": "\u2028"}\n', encoding="utf-8")
    tasks = TaskSet.read_or_empty(path)
    tasks[0]["a"].append(2)
    assert [tasks[index] for index in range(len(tasks))] == [{"a": [1]}, {"a": "\u2028"}]
    assert len(TaskSet.read_or_empty(tmp_path / "valid.jsonl")) == 0

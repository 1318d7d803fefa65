"""Task files are the user's: what is wrong in them is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.rollout.task_set import TaskSet


def test_broken_task_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"question": 1}\n{"question": \n')
    with pytest.raises(RecipeError, match=r"tasks\.jsonl:2 is not JSON"):
        TaskSet.read(path)[1]

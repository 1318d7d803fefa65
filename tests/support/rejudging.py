"""Reward functions for `areal-hpc rejudge` of runs whose replies say their rewards."""

import os
from pathlib import Path
from typing import Any

from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE


def read_said(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, scale: float, **task: Any
) -> float:
    assert (prompt, prompt_ids, completion_ids) == ([{"role": "user", "content": "?"}], None, None)
    return scale * float(completions)


async def count_messages(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, conversation: Any, **_: Any
) -> float:
    return float(len(conversation))


def fail_on_zero(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **task: Any
) -> float:
    return 1 / float(completions)


def read_isolation(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, **task: Any
) -> float:
    return float(os.environ[ISOLATION_VARIABLE] == "none")


def read_score(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, folder: Path, **task: Any
) -> float:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert names == ["made", "made/score"], names
    return float((folder / "made" / "score").read_text())


def judge_folder(*, folder: str, **task: Any) -> float:
    raise AssertionError("never called")

"""Demonstrations: what a line may be, and what is said of one that it may not be."""

import json
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.sft.sft_data import read_demonstrations

GOOD = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


def test_blank_lines_are_no_demonstrations(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(f"{json.dumps({'messages': GOOD})}\n\n  \n")
    assert read_demonstrations(path) == [GOOD]


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[]",
        "{}",
        '{"messages": []}',
        '{"messages": "text"}',
        '{"messages": [{"role": "user", "content": "1 + 1"}]}',
        '{"messages": [{"content": "2"}]}',
    ],
)
def test_another_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(f"{json.dumps({'messages': GOOD})}\n{line}\n")
    with pytest.raises(RecipeError, match="ending with an assistant's message") as raised:
        read_demonstrations(path)
    assert raised.value.problems[0].key == f"{path}:2"

"""Demonstrations: what a line may be, and what is said of one that it may not be."""

import json
from pathlib import Path
from typing import Any

import pytest

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import RecipeError
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.sft import ConversationTokenizer, Demonstration, read_demonstrations
from tests.support.chatml import TRAINING_TEXT

GOOD = [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]


def test_blank_lines_are_no_demonstrations(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(f"{json.dumps({'messages': GOOD})}\n\n  \n")
    assert read_demonstrations(path) == [Demonstration(GOOD)]


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
        '{"messages": [{"role": "assistant", "content": "2"}], "tools": "add"}',
    ],
)
def test_another_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sft.jsonl"
    path.write_text(f"{json.dumps({'messages': GOOD})}\n{line}\n")
    with pytest.raises(RecipeError, match="ending with an assistant's message") as raised:
        read_demonstrations(path)
    assert raised.value.problems[0].key == f"{path}:2"


def test_tools_and_earlier_turns_are_in_the_prompt_as_an_agent_would_read_them(
    tmp_path: Path,
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages: list[Any] = [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "RESULT"},
        {"role": "assistant", "content": "2"},
    ]
    path = tmp_path / "sft.jsonl"
    path.write_text(json.dumps({"messages": messages, "tools": [{"name": "add"}]}))
    model = tmp_path / "model"
    make_tiny_model(model, TRAINING_TEXT * 20, seed=5)
    (row,) = ConversationTokenizer(model).build_rows(read_demonstrations(path))
    text = TokenEncoder.from_model_dir(model).decode(row.input_ids_T.tolist())
    prompt, _, reply = text.rpartition("<|im_start|>assistant\n")
    assert '{"name": "add"}' in prompt
    assert "RESULT" in prompt
    assert reply.startswith("2<|im_end|>")

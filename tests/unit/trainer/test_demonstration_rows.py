"""Demonstrations become rows whose replies alone are learned, as the template writes them."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.dataset.demonstrations import Demonstration
from areal_hpc.errors import RecipeError
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.trainer.batch.demonstration_rows import PROBE_CODES, DemonstrationTokenizer
from tests.support.chatml import CHATML, write_model_dir
from tests.support.template_scenes import SCENES, TOOLS
from tests.unit.session import families

OPENING = "{{- '<|im_start|>assistant\n' }}"
OPENS_REASONING = CHATML.replace(OPENING, "{{- '<|im_start|>assistant\n<think>\n' }}")
"""As DeepSeek-R1's: the prompt begins the reasoning, which a finished message has not."""
OTHER_END = CHATML.replace(
    "+ '<|im_end|>\n' }}{%- endfor",
    "+ ('<|eot_id|>' if loop.last and message.role == 'assistant' and not add_generation_prompt "
    "else '<|im_end|>\n') }}{%- endfor",
)
"""As gpt-oss': a reply ends otherwise at the end of a conversation."""
REWRITES = CHATML.replace(
    "message.content + '<|im_end|>",
    "(message.content if message.role != 'tool' or messages[-1].role == 'tool' else 'read') "
    "+ '<|im_end|>",
)
"""A result of a tool becomes another text once a message follows it."""
MARKED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{{- 'Reply: ' }}"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKS_NOTHING = CHATML + "{%- if false %}{% generation %}{% endgeneration %}{% endif %}"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' + END


def write_model(folder: Path, template: str) -> Path:
    write_model_dir(folder, template=template)
    families.tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def list_learned(model: Path, *demonstrations: Demonstration) -> list[list[str]]:
    """List the texts of each row that are learned."""
    encoder = TokenEncoder.from_model_dir(model)
    learned = []
    for row in DemonstrationTokenizer(model).build_rows(demonstrations):
        runs: list[list[int]] = [[]]
        for token, is_learned in zip(row.input_ids_T.tolist(), row.loss_mask_T, strict=True):
            if is_learned:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        learned.append([encoder.decode(run) for run in runs])
    return learned


@pytest.mark.parametrize(
    ("template", "scene", "learned"),
    [
        (families.QWEN25, "text", [["Hello." + END, "It is 3." + END]]),
        (families.QWEN25, "call", [[CALL, "It is 3." + END]]),
        (families.LLAMA3, "text", [["Hello.<|eot_id|>", "It is 3.<|eot_id|>"]]),
        (families.UNDELIMITED, "text", [["Hello.\n", "It is 3.\n"]]),
        (
            families.QWEN3,
            "reasoning",
            [
                ["<think>\nHm.\n</think>\n\nHi." + END],
                [
                    f"<think>\nA tool.\n</think>\n\n{CALL}",
                    "<think>\nGood.\n</think>\n\nIt is 3." + END,
                ],
            ],
        ),
        (OPENS_REASONING, "text", [["Hello." + END, "It is 3." + END]]),
        (OTHER_END, "text", [["Hello.<|eot_id|>", "It is 3.<|eot_id|>"]]),
        (REWRITES, "call", [[END, "It is 3." + END]]),
        (MARKED, "text", [["Hello." + END, "It is 3." + END]]),
    ],
)
def test_replies_alone_are_learned(
    tmp_path: Path, template: str, scene: str, learned: list[list[str]]
) -> None:
    demonstration = Demonstration(SCENES[scene], TOOLS if scene == "call" else None)
    assert list_learned(write_model(tmp_path, template), demonstration) == learned


def test_a_reply_is_found_by_its_place_whatever_it_begins_with(tmp_path: Path) -> None:
    """All ranks build the same rows, and the prompt is not learned."""
    model = write_model(tmp_path, OPENS_REASONING)
    replies = ["42 is it", "a", "0", "", *map(chr, PROBE_CODES[:2]), *map("{:x}".format, range(16))]
    question = {"role": "user", "content": "?"}
    demonstrations = [
        Demonstration([question, {"role": "assistant", "content": reply}]) for reply in replies
    ]
    assert list_learned(model, *demonstrations) == [[reply + END] for reply in replies]


def test_a_row_holds_the_conversation_up_to_its_last_reply(tmp_path: Path) -> None:
    model = write_model(tmp_path, families.QWEN25)
    (row,) = DemonstrationTokenizer(model).build_rows([Demonstration(SCENES["call"], TOOLS)])
    encoder = TokenEncoder.from_model_dir(model)
    template = DemonstrationTokenizer(model)._template
    whole = template.render_prompt(SCENES["call"][:-1], tools=TOOLS, opens_reply=False)
    assert encoder.decode(row.input_ids_T.tolist()) == whole.rstrip()
    assert '"description": "adds"' in whole


def test_only_what_follows_the_prompt_is_learned(tmp_path: Path) -> None:
    model = write_model(tmp_path, families.QWEN25)
    conversation = Demonstration(SCENES["text"], first_learned=2)
    text = Demonstration(plain_text=("1 + 1 =", " 2"))
    assert list_learned(model, conversation, text) == [["It is 3." + END], [" 2" + END]]


@pytest.mark.parametrize(
    ("template", "scene", "message"),
    [
        (families.LLAMA3, "parallel calls", "refuses this demonstration: one call at a time"),
        (MARKS_NOTHING, "text", "marks nothing of this demonstration as generated"),
    ],
)
def test_a_template_that_cannot_write_it_is_named(
    tmp_path: Path, template: str, scene: str, message: str
) -> None:
    broken: Any = Demonstration(SCENES[scene], location="demos.jsonl:7")
    with pytest.raises(RecipeError, match=message) as raised:
        list_learned(write_model(tmp_path, template), broken)
    assert raised.value.problems[0].key == "demos.jsonl:7"

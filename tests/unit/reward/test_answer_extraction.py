"""The last answer of a text is found in time proportional to the text."""

import re
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_hpc.reward.answer_extraction import extract_boxed, extract_code, extract_tagged
from tests.support.commands import run_program, said_by

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
FENCED = re.compile(
    r"(?:^[^\S\n]*```(?P<label>[^`\n]*)|```(?:python3?|py)?[^\S\n]*)\n(?P<code>.*?)```",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
"""What is meant, as one expression each. Their time grows with the square of the text."""

TAGS = ["<answer>", "</answer>", "<ANSWER>", "</Answer>", "<an\u017fwer>"]
TAGS += ["<", "/", "answer>", "a\n "]
FENCES = [
    "```",
    "``",
    "`",
    "python",
    "\n```",
    "3",
    "Py",
    "text",
    " ",
    "\t",
    "\u00a0",
    "\r",
    "\n",
    "x = 1\n",
]


def texts(pieces: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), max_size=14).map("".join)


@given(texts(TAGS))
@example("<answer>a<answer>b</answer></answer>c</answer>")
@example("<answer>a</answer>b</answer><answer>c")
def test_the_last_tags_are_those_of_the_expression(text: str) -> None:
    found = TAGGED.findall(text)
    assert extract_tagged(text) == (found[-1].strip() if found else None)


@given(texts(FENCES))
@example("```text\na\n```\nb\n```")
@example("````python\na```\n```")
def test_the_last_fence_is_that_of_the_expression(text: str) -> None:
    found = [
        one["code"]
        for one in FENCED.finditer(text)
        if (one["label"] or "").lower().split()[:1] in ([], ["python"], ["python3"], ["py"])
    ]
    assert extract_code(text) == (found[-1] if found else None)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("Run\n```bash\npip install x\n```\nand\n```python\nx = 1\n```\n", "x = 1\n"),
        ("```python\nx = 1\n```\nIt prints\n```text\n1\n```\nas asked.\n", "x = 1\n"),
        ("```python3\nx = 1\n```", "x = 1\n"),
        ('  ```Python title="a.py"\nx = 1\n  ```', "x = 1\n  "),
        ("Between ``` and ```:\n```\nx = 1\n```", "x = 1\n"),
        ("So: ```py\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```\n", None),
    ],
)
def test_blocks_of_other_languages_are_no_code(reply: str, code: str | None) -> None:
    assert extract_code(reply) == code


def test_a_box_may_hold_braces() -> None:
    assert extract_boxed("\\boxed{1} or \\boxed{\\frac{1}{2}}}") == "\\frac{1}{2}"
    assert extract_boxed("\\boxed{1} or \\boxed{\\frac{1}{2}") is None
    assert extract_boxed("1") is None


OPENINGS = {
    "extract_tagged": ("<answer>", "<answer></answer>", "</answer>"),
    "extract_code": ("```python\n", "```\n```", "``` \t"),
    "extract_boxed": ("\\boxed{", "\\boxed{}"),
}


def test_two_megabytes_of_openings_take_no_minutes() -> None:
    calls = [
        f"{name}({piece!r} * 250_000)" for name, pieces in OPENINGS.items() for piece in pieces
    ]
    program = "\n".join(("from areal_hpc.reward.answer_extraction import *", *calls))
    said_by(run_program(sys.executable, "-c", program, timeout_s=60.0))

"""The last answer of a text is found in time proportional to the text."""

import re
import sys

from hypothesis import example, given
from hypothesis import strategies as st

from areal_hpc.reward.answer_extraction import extract_boxed, extract_code, extract_tagged
from tests.support.commands import run_program, said_by

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
FENCED = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
"""What is meant, as one expression each. Their time grows with the square of the text."""

TAGS = ["<answer>", "</answer>", "<ANSWER>", "</Answer>", "<an\u017fwer>"]
TAGS += ["<", "/", "answer>", "a\n "]
FENCES = ["```", "``", "`", "python", "Py", "text", " ", "\t", "\u00a0", "\r", "\n", "x = 1\n"]


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
    found = FENCED.findall(text)
    assert extract_code(text) == (found[-1] if found else None)


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

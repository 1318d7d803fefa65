"""Answers are found in time, and compared as mathematics, however they are written."""

import math
import re
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal_hpc.errors import RecipeError
from areal_hpc.reward.answer_extraction import extract_boxed, extract_code, extract_tagged
from areal_hpc.reward.gsm8k import gsm8k_reward_fn
from areal_hpc.reward.math import build_math_pool, math_reward
from areal_hpc.reward.math_process import MAX_LOG2, compute_log2_upper_bound
from tests.support.commands import run_program, said_by
from tests.support.deadlines import scaled

CONTINUED = "1+\\frac{1}{" * 12 + "1" + "}" * 12


def value_of(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)[0]


def reward(completion: str, answer: str) -> float:
    return math_reward("", completion, [], [], answer=answer)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ("2^{100}", "1267650600228229401496703205376"),
        ("10^{10}", "10000000000"),
        ("3^{2^{5}}", "1853020188851841"),
        ("2^{2^{2^{2}}}", "65536"),
        ("100!", str(math.factorial(100))),
        ("1000!", "1000!"),
        ("9^{9^{9^{9}}}", "9^{9^{9^{9}}}"),
        ("\\binom{100}{50}", str(math.comb(100, 50))),
        ("x^{10}+10x^9+45x^8+120x^7+210x^6+252x^5+210x^4+120x^3+45x^2+10x+1", "(x+1)^{10}"),
        (CONTINUED, "\\frac{377}{233}"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix}1&2\\\\3&4\\end{bmatrix}"),
        ("(-\\infty,2]\\cup(3,\\infty)", "(-\\infty,2]\\cup(3,\\infty)"),
        ("\\{3,2,1\\}", "\\{1,2,3\\}"),
    ],
)
def test_large_and_long_answers_are_judged_by_their_value(given: str, answer: str) -> None:
    assert reward(f"so \\boxed{{{given}}}", answer) == 1.0
    assert reward(f"({'(' * 200} so \\boxed{{{given}}}", answer) == 1.0
    assert reward("so \\boxed{8}", answer) == 0.0


@pytest.mark.parametrize(
    ("given", "answer", "expected"),
    [
        ("0.0", "10^{-7}", 0.0),
        ("0.0000014", "0.000001", 0.0),
        ("1.0 \\cdot 10^{-7}", "10^{-7}", 1.0),
        ("0.333333", "\\frac{1}{3}", 1.0),
        ("0.3333", "\\frac{1}{3}", 0.0),
        ("0", "0", 1.0),
        ("\\{1,2\\}", "(1,2)", 0.0),
        ("(1,2)", "\\{1,2\\}", 0.0),
        ("\\left\\{1,2\\right\\}", "(1,2)", 0.0),
        ("(1,2)", "(1,2)", 1.0),
        ("\u221242", "-42", 1.0),
        ("\u221242", "42", 0.0),
    ],
)
def test_small_numbers_and_pairs_stay_as_they_are(given: str, answer: str, expected: float) -> None:
    assert reward(f"so \\boxed{{{given}}}", answer) == expected


def test_a_task_whose_answer_is_no_mathematics_is_refused() -> None:
    for _ in range(2):
        with pytest.raises(RecipeError, match="answer cannot be parsed as mathematics: ''"):
            reward("\\boxed{7}", "")
    assert reward("\\boxed{7}", "7") == 1.0


def test_any_text_reaches_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    # A hundred thousand characters take seconds on a busy machine, which are granted here.
    patient = build_math_pool(scaled(60.0))
    monkeypatch.setattr("areal_hpc.reward.math._VERIFIER_POOL", patient)
    assert reward("\ud800\n\x00 \u2028 caf\u00e9 \\boxed{7}", "7") == 1.0
    assert reward("7" * 100_000, "7") == 0.0
    assert reward("\\boxed{7}", "7 " + "\\quad " * 100_000) == 1.0
    patient.close()


@pytest.mark.parametrize(
    "text", ["9", "2^{10}", "3^{2^{5}}", "(3^{2})^{5}", "1^{9}", "20!", "2^{5!}"]
)
def test_the_size_of_a_whole_number_is_known_without_computing_it(text: str) -> None:
    value = value_of(text)
    exact = math.log2(int(value.doit()))
    assert exact * 0.1 <= compute_log2_upper_bound(value) <= exact + 1e-9


@pytest.mark.parametrize(
    "text", ["-9", "9^{-5}", "0.5", "x^{9}", "\\frac{1}{2}", "9^{x}", "0!", "0^{9}"]
)
def test_nothing_is_said_of_the_size_of_anything_else(text: str) -> None:
    value = value_of(text)
    assert not compute_log2_upper_bound(value) > 0
    assert MAX_LOG2 < compute_log2_upper_bound(value_of("9^{9^{9^{9}}}")) < math.inf


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("3 apples and 4 are \\boxed{7}.", "7", 1.0),
        ("so #### 1,234", "1 + 1233 = 1234\n#### 1,234", 1.0),
        ("it costs $12.50", "12.5", 1.0),
        ("a half: 1/2", "0.5", 1.0),
        ("7, no: \\boxed{8} of 7", "7", 0.0),
        ("-7", "7", 0.0),
        ("no idea", "7", 0.0),
        ("\\boxed{}, or 7", "7", 0.0),
        ("1/0", "7", 0.0),
        ("#### 1.5/2", "7", 0.0),
        ("\\boxed{1{,}234}", "1234", 1.0),
        ("\\boxed{12\\,345,\\!678}", "12345678", 1.0),
        ("\\boxed{(1\\,23)}", "23", 1.0),
        ("\\boxed{7}", 7, 1.0),
        ("\\boxed{0.5}", 0.5, 1.0),
        ("The answer is \u221242", "42", 0.0),
        ("The answer is \u221242", "-42", 1.0),
        ("The answer is \uff0d42", "-42", 1.0),
        ("1,2,3,4", "1234", 0.0),
        ("12,34", "1234", 0.0),
        ("he pays 1,234, in all", "1234", 1.0),
        ("1,234,567.5", "1234567.5", 1.0),
        ("1,2345", "12345", 0.0),
        ("7, and no end of it: " + "9" * 5000, "7", 0.0),
    ],
)
def test_the_last_number_counts(completion: str, answer: str | float, reward: float) -> None:
    assert gsm8k_reward_fn(None, completion, None, None, answer) == reward


def test_a_task_without_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="contains no number"):
        gsm8k_reward_fn(None, "7", None, None, "seven")


TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
FENCED = re.compile(
    r"(?:^[^\S\n]*```(?P<label>[^`\n]*)|```(?:python3?|py)?[^\S\n]*)\n(?P<code>.*?)```",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)
"""Reference expressions. Their time grows with the square of the text."""

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
    matches = TAGGED.findall(text)
    assert extract_tagged(text) == (matches[-1].strip() if matches else None)


@given(texts(FENCES))
@example("```text\na\n```\nb\n```")
@example("````python\na```\n```")
def test_the_last_fence_is_that_of_the_expression(text: str) -> None:
    blocks = [
        match["code"]
        for match in FENCED.finditer(text)
        if (match["label"] or "").lower().split()[:1] in ([], ["python"], ["python3"], ["py"])
    ]
    assert extract_code(text) == (blocks[-1] if blocks else None)


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

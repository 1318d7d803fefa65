"""Answers are compared as mathematics, however large and however written."""

import math
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.reward.math import build_math_pool, math_reward
from areal_hpc.reward.math_process import MAX_LOG2, compute_log2_upper_bound
from tests.support.deadlines import scaled

CONTINUED = "1+\\frac{1}{" * 12 + "1" + "}" * 12


def value_of(text: str) -> Any:
    from math_verify import parse

    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)[0]


def reward(said: str, answer: str) -> float:
    return math_reward("", said, [], [], answer=answer)


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
def test_small_numbers_and_ordered_pairs_are_what_they_are(
    given: str, answer: str, expected: float
) -> None:
    assert reward(f"so \\boxed{{{given}}}", answer) == expected


def test_a_task_whose_answer_is_no_mathematics_is_refused() -> None:
    for _ in range(2):
        with pytest.raises(RecipeError, match="answer cannot be parsed as mathematics: ''"):
            reward("\\boxed{7}", "")
    assert reward("\\boxed{7}", "7") == 1.0


def test_any_text_reaches_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    # A hundred thousand characters take seconds where the machine is busy: that is not asked here.
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

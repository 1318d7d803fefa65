"""Reward for GSM8K: a comparison of one number, which needs no package."""

import re
from fractions import Fraction
from typing import Any

from areal_hpc.reward.answer_extraction import extract_boxed, replace_typographic_minus

_THOUSANDS_PATTERN = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!])(?=\d{3})")
"""Separators of thousands in LaTeX: `1{,}234`, `1\\,234`, `1,\\!234`."""
_NUMBER_PATTERN = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d|,\d)|\d+)(?:\.\d+)?(?:/\d+)?")
"""Number, in which commas may group thousands."""


def gsm8k_reward_fn(
    prompt: Any,
    completions: str,
    prompt_ids: Any,
    completion_ids: Any,
    answer: str | float,
    **task: Any,
) -> float:
    r"""Return 1.0 if the reply's number is the right one, else 0.0.

    The reply's number is the last one in the last `\boxed{...}`, else after the last `####`, else
    in the whole reply. `answer` is the right number, as text or as a number, or GSM8K's solution,
    which ends in `#### 1,234`.
    """
    expected = _extract_last_number(str(answer).rpartition("####")[2])
    if expected is None:
        raise ValueError(f"the reference answer contains no number: {answer!r:.200}")
    in_box = extract_boxed(completions)
    given = _extract_last_number(completions.rpartition("####")[2] if in_box is None else in_box)
    return float(given == expected)


def _extract_last_number(text: str) -> Fraction | None:
    text = _THOUSANDS_PATTERN.sub("", replace_typographic_minus(text))
    numbers = _NUMBER_PATTERN.findall(text)
    try:
        return Fraction(numbers[-1].replace(",", "")) if numbers else None
    except (ZeroDivisionError, ValueError):  # 1/0; 1.5/2, or more digits than Python reads
        return None

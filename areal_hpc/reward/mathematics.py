"""Answers of mathematics: numbers, fractions, sets, expressions, by `math-verify`."""

from __future__ import annotations

import functools
from typing import Any

from areal_hpc.errors import RecipeError

LONGEST_ANSWER_CHARS = 4000
"""An answer stands near the end; parsing the whole of a long chain of thought takes seconds."""


def math_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **task: Any
) -> float:
    r"""1.0 if the answer given equals the right one as mathematics, else 0.0.

    The answer is the last `\boxed{...}`, formula or number, as math-verify finds it. math-verify's
    own time limits are off: they need the main thread and its alarm signal.

    Args:
        prompt: Not looked at; nor are `prompt_ids` and `completion_ids`.
        completions: What the model said.
        prompt_ids: Tokens of the prompt.
        completion_ids: Tokens of the reply.
        answer: The right answer, LaTeX without dollar signs.
        task: The rest of the task, not looked at.
    """
    from math_verify import verify

    given = _parsed(completions[-LONGEST_ANSWER_CHARS:])
    return float(bool(given) and verify(_right(answer), given, timeout_seconds=None))


@functools.lru_cache(maxsize=4096)
def _right(answer: str) -> Any:
    parsed = _parsed(f"\\boxed{{{answer}}}")
    if not parsed:
        raise RecipeError(
            f"the task's own answer is no mathematics: {answer!r:.200}",
            key="answer",
            hint="give LaTeX, such as \\frac{1}{2}, without dollar signs",
        )
    return parsed


def _parsed(text: str) -> Any:
    from math_verify import parse

    return parse(text, parsing_timeout=None)

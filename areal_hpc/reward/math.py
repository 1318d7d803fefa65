"""Reward for mathematics, by `math-verify`."""

import itertools
import json
import logging
import sys
from contextlib import nullcontext
from typing import Any

from areal_hpc.errors import AgentError, RecipeError
from areal_hpc.reward import math_process
from areal_hpc.reward.answer_extraction import extract_boxed, replace_typographic_minus
from areal_hpc.reward.verifier_pool import VerifierPool

log = logging.getLogger(__name__)

REPLY_TAIL_CHARS = 4000
"""Length of a reply's end that is parsed: parsing a long chain of thought takes seconds."""
MATH_TIMEOUT_S = 5.0
"""Time limit of one comparison, which mostly takes a hundredth of a second."""
MATH_MEMORY_BYTES = 1024**3
"""Memory that the process of comparisons may take beside its packages."""
MAX_NESTING = 100
"""Maximum nesting of brackets in a box; math-verify's parser fails a little above it."""


def build_math_pool(timeout_s: float) -> VerifierPool:
    """Build a pool of processes that compare answers, each within a time limit."""
    command = [sys.executable, "-P", math_process.__file__]
    command += [str(timeout_s + 1.0), str(MATH_MEMORY_BYTES)]
    return VerifierPool(lambda: nullcontext({"args": command}), timeout_s)


_VERIFIER_POOL = build_math_pool(MATH_TIMEOUT_S)


def math_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **task: Any
) -> float:
    r"""Return 1.0 if the reply's answer equals the right one as mathematics, else 0.0.

    The answer is the last `\boxed{...}`, formula or number that math-verify extracts. One that
    cannot be compared within `MATH_TIMEOUT_S`, such as a tower of powers, earns 0.0: the comparison
    runs in a process of its own, which is then killed. The call may come from any thread. It blocks
    meanwhile, and a second longer while such a process starts, so call it from an event loop
    through `AsyncRewardWrapper`. The task's `answer` is LaTeX without dollar signs.

    Raises:
        RecipeError: The task's own answer is no mathematics.
        ClusterError: The process of the comparison could not be started.
    """
    answer, tail = map(replace_typographic_minus, (answer, completions[-REPLY_TAIL_CHARS:]))
    in_box = extract_boxed(tail)
    if in_box is not None and _count_deepest_nesting(in_box) > MAX_NESTING:
        return 0.0
    # math-verify treats a set and an ordered pair as equal.
    if {_get_collection_kind(answer), _get_collection_kind(in_box or "")} == {"set", "tuple"}:
        return 0.0
    try:
        verdict = _VERIFIER_POOL.ask(json.dumps([answer, tail]).encode())
    except (TimeoutError, AgentError) as error:
        fault = "ended its process" if isinstance(error, AgentError) else "took too long"
        log.warning(
            "math_reward: comparing with %.80r %s (limits: %g s, %d MiB), reward 0: %.80r",
            answer,
            fault,
            MATH_TIMEOUT_S,
            MATH_MEMORY_BYTES >> 20,
            in_box or tail[-80:],
        )
        return 0.0
    if verdict == math_process.UNPARSABLE_REFERENCE:
        raise RecipeError(
            f"the reference answer cannot be parsed as mathematics: {answer!r:.200}",
            key="answer",
            hint="give LaTeX, such as \\frac{1}{2}, without dollar signs",
        )
    return float(verdict == math_process.EQUAL)


def _get_collection_kind(latex: str) -> str | None:
    if "," not in latex:
        return None
    opening = latex.strip().removeprefix("\\left").lstrip()
    if opening.startswith("\\{"):
        return "set"
    return "tuple" if opening.startswith(("(", "[")) else None


def _count_deepest_nesting(text: str) -> int:
    steps = ({"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(sign, 0) for sign in text)
    return max(itertools.accumulate(steps), default=0)

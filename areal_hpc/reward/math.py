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
"""An answer stands near the end; parsing the whole of a long chain of thought takes seconds."""
MATH_TIMEOUT_S = 5.0
"""Time for one comparison; an ordinary one takes a hundredth of a second."""
MATH_MEMORY_BYTES = 1024**3
"""Memory that the process of comparisons may take beside its packages."""
MAX_NESTING = 100
"""Of brackets within a box. The parser of math-verify gives up not far above this."""


def build_math_pool(timeout_s: float) -> VerifierPool:
    """Processes that compare, each answer within a time."""
    command = [sys.executable, "-P", math_process.__file__]
    command += [str(timeout_s + 1.0), str(MATH_MEMORY_BYTES)]
    return VerifierPool(lambda: nullcontext({"args": command}), timeout_s)


_VERIFIER_POOL = build_math_pool(MATH_TIMEOUT_S)


def math_reward(
    prompt: Any, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **task: Any
) -> float:
    r"""1.0 if the answer given equals the right one as mathematics, else 0.0.

    The answer is the last `\boxed{...}`, formula or number, as math-verify finds it. One that
    cannot be compared within `MATH_TIMEOUT_S`, such as a tower of powers, is worth 0.0: the
    comparison is made in a process of its own, which is killed then, from whatever thread this is
    called. The call blocks meanwhile, and a second longer while such a process starts, so an event
    loop that must go on calls it through `AsyncRewardWrapper`. The task's `answer` is LaTeX without
    dollar signs.

    Raises:
        RecipeError: The task's own answer is no mathematics.
        ClusterError: The process of the comparison could not be started.
    """
    answer, said = map(replace_typographic_minus, (answer, completions[-REPLY_TAIL_CHARS:]))
    in_box = extract_boxed(said)
    if in_box is not None and _count_deepest_nesting(in_box) > MAX_NESTING:
        return 0.0
    # math-verify takes a set for an ordered pair.
    if {_get_collection_kind(answer), _get_collection_kind(in_box or "")} == {"set", "tuple"}:
        return 0.0
    try:
        verdict = _VERIFIER_POOL.ask(json.dumps([answer, said]).encode())
    except (TimeoutError, AgentError) as error:
        how = "ended its process" if isinstance(error, AgentError) else "took too long"
        log.warning(
            "math_reward: comparing with %.80r %s (limits: %g s, %d MiB), reward 0: %.80r",
            answer,
            how,
            MATH_TIMEOUT_S,
            MATH_MEMORY_BYTES >> 20,
            in_box or said[-80:],
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

"""Comparisons by math-verify: `python math_process.py TIMEOUT_S MEMORY_BYTES`, its own process.

Stands alone: it is started by its path, by `areal_hpc/reward/verifier_pool.py`. Reads lines of
`["the right answer", "what the model said"]`, after a first one, from a socket, its standard input.
"""

import contextlib
import functools
import json
import logging
import math
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

READY = b"{}"
EQUAL = b"1"
DIFFERENT = b"0"
UNPARSABLE_REFERENCE = b"?"
"""The right answer cannot be parsed."""
MAX_RELATIVE_DIFFERENCE = 1e-5
"""Between two numbers that count as equal."""
MAX_LOG2 = 2.0**20
"""Whole numbers of this many bits are computed in an instant; twenty times as many take long."""


def main() -> None:
    """Answer until the parent is gone."""
    timeout_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which still needs us
        signal.signal(number, signal.SIG_IGN)
    # The kernel ends this process when the parent is not there to do it, whatever runs here.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its own limits are off
    judge_reply("1", "1")  # imports, and compiles its expressions
    limit_memory(memory_bytes)
    with (
        contextlib.suppress(ConnectionError),  # the parent is gone
        socket.socket(fileno=sys.stdin.fileno()) as channel,
        channel.makefile("rb") as questions,
    ):
        channel.setblocking(True)
        questions.readline()
        channel.sendall(READY + b"\n")
        for line in questions:
            answer, said = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            found = judge_reply(answer, said)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            channel.sendall(found + b"\n")


def limit_memory(more_bytes: int) -> None:
    """Allow this much more than there is now, and no image of a crash."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for which, most in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + more_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        ceiling = resource.getrlimit(which)[1]
        most = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
        resource.setrlimit(which, (most, most))


def judge_reply(answer: str, reply_text: str) -> bytes:
    """Compare the answer of a reply with the right one."""
    from math_verify import verify

    given = _parse_answer(reply_text)
    if not given:
        return DIFFERENT
    right = _parse_right_answer(answer)
    if not right:
        return UNPARSABLE_REFERENCE
    if _is_far_larger(given[0], right[0]) or _is_far_larger(right[0], given[0]):
        return DIFFERENT
    if not verify(right, given, timeout_seconds=None):
        return DIFFERENT
    return EQUAL if _agree_relatively(right[0], given[0]) else DIFFERENT


@functools.lru_cache(maxsize=4096)
def _parse_right_answer(answer: str) -> Any:
    return _parse_answer(f"\\boxed{{{answer}}}")


def _parse_answer(text: str) -> Any:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def _agree_relatively(right: Any, given: Any) -> bool:
    from sympy import Expr

    if right == given or not all(isinstance(one, Expr) and one.is_number for one in (right, given)):
        return True
    exact, said = (complex(one.evalf(15)) for one in (right, given))
    return exact == said or abs(exact - said) <= MAX_RELATIVE_DIFFERENCE * max(
        abs(exact), abs(said)
    )


def _is_far_larger(large_expression: Any, plain_number: Any) -> bool:
    """A tower of powers or a factorial beside a plain number, told apart without computing it.

    Only this: within a larger expression, such as a remainder, it may not have to be computed.
    """
    from sympy import Number

    return (
        isinstance(plain_number, Number)
        and compute_log2_upper_bound(large_expression) > MAX_LOG2
        and not compute_log2_upper_bound(plain_number) > MAX_LOG2
    )


def compute_log2_upper_bound(value: Any) -> float:
    """At most the binary logarithm of an uncomputed positive integer; NaN for anything else."""
    from sympy import Integer, Pow, factorial

    if isinstance(value, Integer):
        return math.log2(int(value)) if value > 0 else math.nan
    if isinstance(value, Pow):
        base, exponent = (compute_log2_upper_bound(part) for part in value.args)
        return base * _capped_power_of_2(exponent)
    if isinstance(value, factorial):
        number = _capped_power_of_2(compute_log2_upper_bound(value.args[0]))
        return max(number * (math.log2(number) - 1.5), 0.0)  # after Stirling
    return math.nan


def _capped_power_of_2(exponent: float) -> float:
    return math.nan if math.isnan(exponent) else 2.0 ** min(exponent, 1000.0)


if __name__ == "__main__":
    main()

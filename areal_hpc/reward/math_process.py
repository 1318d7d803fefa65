"""Process that compares answers by math-verify: `python math_process.py TIMEOUT_S MEMORY_BYTES`.

It imports nothing of areal_hpc: `areal_hpc/reward/verifier_pool.py` starts it by its path. It reads
an opening line, then lines `["right answer", "reply"]`, from a socket, its standard input.
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
"""Answer of this process if the right answer cannot be parsed."""
MAX_RELATIVE_DIFFERENCE = 1e-5
"""Largest relative difference of two numbers that count as equal."""
MAX_LOG2 = 2.0**20
"""Maximum bits of a number to compute: these take an instant, twenty times as many take long."""


def main() -> None:
    """Answer comparisons until the parent closes the socket."""
    timeout_s, memory_bytes = float(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM):  # for the parent, which needs this process
        signal.signal(number, signal.SIG_IGN)
    # The kernel ends this process at the alarm if the parent cannot, also inside C code.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its own limits are off
    judge_reply("1", "1")  # imports the packages, and compiles their regular expressions
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
            answer, reply_text = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            verdict = judge_reply(answer, reply_text)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            channel.sendall(verdict + b"\n")


def limit_memory(more_bytes: int) -> None:
    """Allow this much memory above the present size, and no core dump."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for resource_limit, value in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + more_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        ceiling = resource.getrlimit(resource_limit)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(resource_limit, (value, value))


def judge_reply(answer: str, reply_text: str) -> bytes:
    """Compare a reply's answer with the right one."""
    from math_verify import verify

    parsed = _parse_answer(reply_text)
    if not parsed:
        return DIFFERENT
    right = _parse_right_answer(answer)
    if not right:
        return UNPARSABLE_REFERENCE
    if _is_far_larger(parsed[0], right[0]) or _is_far_larger(right[0], parsed[0]):
        return DIFFERENT
    if not verify(right, parsed, timeout_seconds=None):
        return DIFFERENT
    return EQUAL if _agree_relatively(right[0], parsed[0]) else DIFFERENT


@functools.lru_cache(maxsize=4096)
def _parse_right_answer(answer: str) -> Any:
    return _parse_answer(f"\\boxed{{{answer}}}")


def _parse_answer(text: str) -> Any:
    from math_verify import parse

    return parse(text, parsing_timeout=None)


def _agree_relatively(right: Any, reply: Any) -> bool:
    from sympy import Expr

    if right == reply or not all(isinstance(n, Expr) and n.is_number for n in (right, reply)):
        return True
    first, second = (complex(number.evalf(15)) for number in (right, reply))
    return first == second or abs(first - second) <= MAX_RELATIVE_DIFFERENCE * max(
        abs(first), abs(second)
    )


def _is_far_larger(large_expression: Any, plain_number: Any) -> bool:
    """Return whether a tower of powers or a factorial is far above a number, without computing it.

    Other expressions give False: one with a remainder, for example, may be quick to compute.
    """
    from sympy import Number

    return (
        isinstance(plain_number, Number)
        and compute_log2_upper_bound(large_expression) > MAX_LOG2
        and not compute_log2_upper_bound(plain_number) > MAX_LOG2
    )


def compute_log2_upper_bound(value: Any) -> float:
    """Bound the binary logarithm of an unevaluated positive integer; NaN for anything else."""
    from sympy import Integer, Pow, factorial

    if isinstance(value, Integer):
        return math.log2(int(value)) if value > 0 else math.nan
    if isinstance(value, Pow):
        base, exponent = (compute_log2_upper_bound(part) for part in value.args)
        return base * _capped_power_of_2(exponent)
    if isinstance(value, factorial):
        number = _capped_power_of_2(compute_log2_upper_bound(value.args[0]))
        return max(number * (math.log2(number) - 1.5), 0.0)  # from Stirling's formula
    return math.nan


def _capped_power_of_2(exponent: float) -> float:
    return math.nan if math.isnan(exponent) else 2.0 ** min(exponent, 1000.0)


if __name__ == "__main__":
    main()

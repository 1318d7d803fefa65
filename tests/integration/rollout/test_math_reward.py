"""A reward of mathematics ends whatever the answer holds, and leaves nothing behind."""

import asyncio
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from areal_hpc.errors import WorkerLostError
from areal_hpc.reward import math_process
from areal_hpc.reward.math import MATH_MEMORY_BYTES, build_math_pool, math_reward
from areal_hpc.reward.verifier_pool import VerifierPool
from tests.support.deadlines import scaled
from tests.support.process_commands import alive, command_of
from tests.support.waiting import wait_for

SLOW = ("(x+1)^{2}", "(x+1)^{5000}")
"""The right answer, and one whose difference from it takes minutes to expand."""
AT_ONCE = [
    ("7", "9^{9^{9^{9}}}"),
    ("9^{9^{9^{9}}}", "7"),
    ("7", "(10^{10})!"),
    ("7", "(" * 1990 + "1" + ")" * 1990),
    ("7", "\\frac{1}{" * 390 + "1" + "}" * 390),
]
"""Known to be wrong without a comparison."""
LIMIT_S = scaled(2.5)
"""Of the comparisons asked for here: half of what they may take in a run."""
PATIENCE_S = scaled(30.0)
QUESTION = json.dumps([SLOW[0], f"\\boxed{{{SLOW[1]}}}"])
EASY = json.dumps(["0.5", "\\boxed{\\frac{1}{2}}"]).encode()


@contextmanager
def processes(timeout_s: float) -> Iterator[VerifierPool]:
    """Those of comparisons; none of them is left, and nothing that leads to them."""
    gc.collect()  # what other tests left open is not closed meanwhile
    before = children(), len([*Path("/proc/self/fd").iterdir()])
    pool = build_math_pool(timeout_s)
    try:
        yield pool
    finally:
        pool.close()
    assert (children(), len([*Path("/proc/self/fd").iterdir()])) == before


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def ask(*pairs: tuple[str, str]) -> list[tuple[float, float]]:
    """The reward of each, and the seconds it took; of an easy one after them too."""
    found = []
    for answer, given in (*pairs, ("\\frac{1}{2}", "0.5")):
        began = time.monotonic()
        reward = math_reward("", f"so $\\boxed{{{given}}}$.", [], [], answer=answer)
        found.append((reward, time.monotonic() - began))
    return found


async def ask_in_loop(*pairs: tuple[str, str]) -> list[tuple[float, float]]:
    return ask(*pairs)


def test_an_endless_answer_is_worth_zero_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    with processes(LIMIT_S) as pool, ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr("areal_hpc.reward.math._VERIFIER_POOL", pool)
        *known, (slow, slow_s), (easy, _) = ask(*AT_ONCE, SLOW)
        assert (*(reward for reward, _ in known), slow, easy) == (0.0,) * 6 + (1.0,)
        assert max(seconds for _, seconds in known[1:]) < LIMIT_S < slow_s
        (pid,) = children() - before
        assert resource.prlimit(pid, resource.RLIMIT_AS)[1] < 2 * MATH_MEMORY_BYTES
        elsewhere = thread.submit(ask, SLOW)
        in_loop = asyncio.run(ask_in_loop(AT_ONCE[0], ("7", "9^{9^{9}}+1")))
        for found in (in_loop, elsewhere.result()):
            *endless, (easy, _) = found
            assert {reward for reward, _ in endless} == {0.0}
            assert max(seconds for _, seconds in endless) > LIMIT_S
            assert easy == 1.0


def test_what_stops_the_parent_leaves_a_worker_but_a_death_is_noticed() -> None:
    before = children()
    with processes(PATIENCE_S) as pool:
        assert pool.ask(EASY) == math_process.EQUAL
        (pid,) = children() - before
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid, number)
        assert pool.ask(EASY) == math_process.EQUAL
        assert children() - before == {pid}
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not alive([psutil.Process(pid)]))
        assert pool.ask(EASY) == math_process.EQUAL
        (pid,) = children() - before
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerLostError):
            pool.ask(QUESTION.encode())
        assert children() == before


def test_forks_have_workers_of_their_own_and_all_die_with_a_parent_that_is_killed() -> None:
    path = Path(__file__).with_name("forking_script.py")
    command = [sys.executable, "-W", "error", str(path), QUESTION]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as script:
        assert script.stdout is not None
        try:
            assert script.stdout.readline() == b"ready\n"
        finally:
            family = psutil.Process(script.pid).children()
            script.kill()
    forked, *workers = sorted(family, key=lambda one: "math_process" in " ".join(command_of(one)))
    try:
        assert len(workers) == 2
        wait_for(lambda: alive(family) == [forked])
    finally:
        for one in alive(family):
            one.kill()

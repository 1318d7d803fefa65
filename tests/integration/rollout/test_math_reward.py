"""A reward of mathematics ends whatever the answer holds, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from areal_hpc.errors import ClusterError, VerifierLostError
from areal_hpc.reward import math_process
from areal_hpc.reward.math import MATH_MEMORY_BYTES, math_reward
from areal_hpc.reward.verifier_pool import VerifierPool
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper
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
SCRIPT = Path(__file__).with_name("math_rewards.py")
LIMIT_S = 2.5
"""Of the script's comparisons: half of what they may take in a run."""
QUESTION = json.dumps([SLOW[0], f"\\boxed{{{SLOW[1]}}}"]).encode() + b"\n"
EASY = json.dumps(["0.5", "\\boxed{\\frac{1}{2}}"]).encode() + b"\n"


def processes(timeout_s: float) -> VerifierPool:
    limits = (str(timeout_s + 1.0), str(MATH_MEMORY_BYTES))
    return VerifierPool(Path(math_process.__file__), *limits, timeout_s=timeout_s)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_an_answer_without_end_is_worth_nothing_wherever_it_is_asked_about() -> None:
    asked = {
        "main thread": [*AT_ONCE, SLOW],
        "threads": [SLOW],
        "event loop": [*AT_ONCE[:1], ("7", "9^{9^{9}}+1")],
    }
    scripts = {
        how: subprocess.Popen(
            [
                sys.executable,
                str(SCRIPT),
                str(LIMIT_S),
                how,
                *(text for pair in pairs for text in pair),
            ],
            stdout=subprocess.PIPE,
        )
        for how, pairs in asked.items()
    }
    try:
        for how, script in scripts.items():
            rewards, seconds = json.loads(script.communicate(timeout=60.0)[0])
            expected = [0.0] * len(asked[how]) + [1.0]
            assert sorted(rewards) == sorted(expected * (2 if how == "threads" else 1))
            assert max(seconds) > LIMIT_S
            if how == "main thread":
                assert max(seconds[1 : len(AT_ONCE)]) < LIMIT_S
    finally:
        for script in scripts.values():
            script.kill()
            script.communicate()


def test_a_wrapper_with_its_defaults_needs_one_try(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> tuple[float, float, int]:
        wrapper = AsyncRewardWrapper(math_reward)
        asking = asyncio.create_task(wrapper("", f"\\boxed{{{SLOW[1]}}}", [], [], answer=SLOW[0]))
        ticks = 0
        while not asking.done():
            await asyncio.sleep(0.1)
            ticks += 1
        easy = await wrapper("", "\\boxed{7}", [], [], answer="7")
        for one in psutil.Process().children(recursive=True):
            if "math_process" in " ".join(one.cmdline()) and one.pid not in children():
                grandchildren.append(one)
        wrapper.close()
        return await asking, easy, ticks

    grandchildren: list[psutil.Process] = []
    slow, easy, ticks = asyncio.run(asyncio.wait_for(ask(), 60.0))
    assert (slow, easy) == (0.0, 1.0)
    assert ticks > 10
    assert caplog.records == []  # of tries
    assert len(grandchildren) in (1, 2)  # as many as the wrapper had processes
    wait_for(lambda: not any(is_alive(one) for one in grandchildren))


def test_a_late_worker_is_killed_and_another_answers() -> None:
    pool = processes(timeout_s=1.0)
    before = children(), descriptors()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            pool.ask(QUESTION)
        assert pool.ask(EASY) == math_process.EQUAL
    (pid,) = children() - before[0]
    assert resource.prlimit(pid, resource.RLIMIT_AS)[1] < 2 * MATH_MEMORY_BYTES
    pool.close()
    assert (children(), descriptors()) == before


def test_threads_ask_at_once() -> None:
    pool = processes(timeout_s=30.0)
    answers: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(pool.ask(EASY) for _ in range(20)))
        for _ in range(8)
    ]
    before = children()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [math_process.EQUAL] * 160
    assert 1 <= len(children() - before) <= len(os.sched_getaffinity(0))
    pool.close()


def test_what_stops_the_parent_leaves_a_worker_but_a_death_is_noticed() -> None:
    pool = processes(timeout_s=30.0)
    before = children()
    assert pool.ask(EASY) == math_process.EQUAL
    (pid,) = children() - before
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
    assert pool.ask(EASY) == math_process.EQUAL
    assert children() - before == {pid}
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(psutil.Process(pid)))
    assert pool.ask(EASY) == math_process.EQUAL
    (pid,) = children() - before
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(VerifierLostError):
        pool.ask(QUESTION)
    assert children() == before
    pool.close()


def test_a_program_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    pool = VerifierPool(tmp_path / "missing.py", timeout_s=1.0)
    with pytest.raises(ClusterError, match=r"missing.py was gone before it was ready"):
        pool.ask(EASY)


WARM = """
import os, signal, sys, time, threading
from areal_hpc.reward.math import math_reward

def reward():
    return math_reward("", "\\\\boxed{7}", [], [], answer="7")

assert reward() == 1.0
"""
FORK = """
def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()

before = children()
descriptors = len(os.listdir("/proc/self/fd"))
child = os.fork()
if not child:
    assert len(os.listdir("/proc/self/fd")) == descriptors - 1
    assert children() == []
    assert reward() == 1.0
    assert len(children()) == 1
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert reward() == 1.0
assert children() == before
"""
SLEEP = """
if not os.fork():
    time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""
BUSY = """
from pathlib import Path
from areal_hpc.reward import math, math_process
limits = ["3.0", str(2**30)]
pool = math.VerifierPool(Path(math_process.__file__), *limits, timeout_s=600.0)
pool.ask(b'["7", "7"]\\n')
threading.Timer(0.3, print, ("ready",), {"flush": True}).start()
pool.ask(sys.argv[1].encode() + b"\\n")
"""


def test_a_child_of_a_fork_has_workers_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WARM + FORK], check=True, timeout=60.0)


@contextmanager
def killed_script(source: str) -> Iterator[list[psutil.Process]]:
    """The children that a script had when it was killed."""
    command = [sys.executable, "-c", WARM + source, QUESTION.decode().strip()]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as script:
        assert script.stdout is not None
        try:
            assert script.stdout.readline() == b"ready\n"
        finally:
            family = psutil.Process(script.pid).children()
            script.kill()
        try:
            yield family
        finally:
            for one in family:
                if is_alive(one):
                    one.kill()


@pytest.mark.parametrize(
    ("source", "count", "stay"), [(SLEEP, 2, 1), (BUSY, 2, 0)], ids=["idle", "busy"]
)
def test_workers_die_with_a_parent_that_is_killed(source: str, count: int, stay: int) -> None:
    with killed_script(source) as family:
        assert len(family) == count
        wait_for(lambda: sum(map(is_alive, family)) == stay)

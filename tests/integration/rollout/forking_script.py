"""User's script without a guard of its main module: gets rewards, forks, and is killed at work.

Prints `ready` once it has an idle worker, a busy one, which goes on for minutes with the question
that is its argument, and a sleeping child.
"""

import os
import sys
import threading
import time
from pathlib import Path

from areal_hpc.reward import math


def reward() -> float:
    return math.math_reward("", "\\boxed{7}", [], [], answer="7")


def children() -> list[str]:
    return [
        pid
        for thread in Path("/proc/self/task").iterdir()
        for pid in (thread / "children").read_text().split()
    ]


def count_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


assert reward() == 1.0
workers, descriptors = children(), count_descriptors()
if not (child := os.fork()):
    assert count_descriptors() == descriptors - 1
    assert children() == []
    assert reward() == 1.0
    assert len(children()) == 1
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0, "it has workers of its own"
assert reward() == 1.0
assert children() == workers
if not os.fork():
    time.sleep(600)
pool = math.build_math_pool(4.0)
pool.ask(b'["7", "7"]')
threading.Timer(0.3, print, ("ready",), {"flush": True}).start()
pool.ask(sys.argv[1].encode())

"""Processes below one are found, however deep they are."""

import subprocess
import sys

from tests.support.environments import CHECKOUT

DEEP = """
import os, signal, sys, time
from areal_hpc.jobs.processes.process_ties import list_descendants
ready, said = os.pipe()
first = os.fork()
if first == 0:
    for _ in range(119):
        if os.fork():
            time.sleep(60)
            os._exit(0)
    os.write(said, b"1")
    time.sleep(60)
    os._exit(0)
os.read(ready, 1)
sys.setrecursionlimit(90)
found = list_descendants(os.getpid())
for pid in found:
    os.kill(pid, signal.SIGKILL)
print(len(found), found[0] == first)
"""


def test_a_deep_chain_of_processes_is_found() -> None:
    command = [sys.executable, "-c", DEEP]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert told.stdout == "120 True\n", told.stderr

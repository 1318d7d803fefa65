"""A clock that leaves out the time in which the machine did nothing for us."""

import os
import signal
import subprocess
import sys
import time

STOPS_ITSELF = """
import os, signal, time
from tests.support.fair_clock import FairClock
with FairClock() as clock:
    began = time.monotonic()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGSTOP)
    whole_s = time.monotonic() - began
    print(whole_s, clock.since(began))
"""
STOP_S = 0.5


def test_a_stop_of_the_machine_is_left_out() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPS_ITSELF], stdout=subprocess.PIPE, text=True
    ) as process:
        os.waitpid(process.pid, os.WUNTRACED)
        time.sleep(STOP_S)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout is not None
        whole_s, fair_s = map(float, process.stdout.read().split())
    assert whole_s >= 0.3 + STOP_S
    assert 0 < fair_s < whole_s - STOP_S + 0.05

"""Time limits in proportion to the machine's speed: a slower one has longer.

The start of an interpreter measures the speed. The measurement is made once, handed down to child
processes, and repeated where a limit passes: load may have begun since.
"""

import os
import subprocess
import sys
from time import monotonic  # tests replace time.monotonic

VARIABLE = "TESTS_SLOWNESS"
"""Variable that hands the measurement to child processes; if it is set, none is made."""
PROGRAM = (
    "import asyncio, concurrent.futures.process, ctypes, decimal, http.server, inspect, pydoc"
    ", sqlite3, ssl, tarfile, tomllib, unittest.mock, xml.dom.minidom, zipfile"
)
COMMAND = (sys.executable, "-I", "-S", "-c", PROGRAM)
STARTS = 2
REFERENCE_S = 0.3
"""Time of these starts on a quiet machine, on which the limits in the tests were chosen."""
MOST = 16.0
"""Largest factor; a slower machine hangs."""
EXTENSIONS = 3


def measure_slowness() -> float:
    """Measure the machine's present time as a multiple of the reference; at least 1."""
    began = monotonic()
    for _ in range(STARTS):
        subprocess.run(COMMAND, check=True, env={}, stdin=subprocess.DEVNULL)
    return min(max((monotonic() - began) / REFERENCE_S, 1.0), MOST)


class _Known:
    """The slowest that this machine has been found to be; 0 before the first look."""

    slowness = float(os.environ.get(VARIABLE, "0"))

    @classmethod
    def look_again(cls) -> float:
        cls.slowness = max(cls.slowness, measure_slowness())
        os.environ[VARIABLE] = f"{cls.slowness:.3g}"
        return cls.slowness


def get_slowness() -> float:
    """Return the machine's known time as a multiple of the reference."""
    return _Known.slowness or _Known.look_again()


def scaled(seconds: float) -> float:
    """Scale seconds of the reference to this machine."""
    return seconds * get_slowness()


class Deadline:
    """End of a wait; it moves while the machine proves slower than its known speed."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._began = monotonic()
        self._extensions = EXTENSIONS
        self.limit_s = scaled(within_s)

    @property
    def left_s(self) -> float:
        return self._began + self.limit_s - monotonic()

    def is_over(self) -> bool:
        """Check that the time is up, also for a machine that is as slow as this one is now."""
        if self.left_s > 0:
            return False
        if self._extensions:
            self._extensions -= 1
            self.limit_s = self._within_s * _Known.look_again()
        return self.left_s <= 0

"""States of runs as Slurm and their files say them, asked for now and then."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.compare import fetch_jobs_of_runs
from areal_hpc.view.jobs import get_run_state

MIN_PAUSE_S = 15.0
"""Between two questions to Slurm about the same runs, however many pages are open."""


class RunStates:
    """What runs were found to be. Safe to use from several threads."""

    def __init__(self) -> None:
        self._queue = QueuePoller()
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[Path, bool], ...], tuple[float, list[str]]] = {}

    def find(self, runs: Sequence[RunPaths]) -> list[str]:
        """A word or two about each run, as old as `MIN_PAUSE_S` unless one has finished since."""
        key = tuple((run.root, run.finished_marker.exists()) for run in runs)
        with self._lock:
            known = self._known.get(key)
            pause_s = max(MIN_PAUSE_S, self._queue.pause_s)
            if known is None or time.monotonic() - known[0] > pause_s:
                found = [get_run_state(one) for one in fetch_jobs_of_runs(runs, self._queue)]
                self._known = {**self._known, key: (time.monotonic(), found)}
                return found
            return known[1]

"""States of runs, from Slurm and from their files, cached for some seconds."""

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.compare import fetch_states_of_runs

MIN_QUERY_INTERVAL_S = 15.0


class RunStateCache:
    def __init__(self) -> None:
        self._queue = QueuePoller()
        self._lock = threading.Lock()
        self._known: dict[tuple[tuple[Path, bool], ...], tuple[float, list[str]]] = {}

    def fetch_or_reuse_states(self, runs: Sequence[RunPaths]) -> list[str]:
        """State of each run, asked again when one has ended and after `MIN_QUERY_INTERVAL_S`."""
        key = tuple((run.root, run.finished_marker.exists()) for run in runs)
        with self._lock:
            asked_at, states = self._known.get(key, (-math.inf, []))
            if time.monotonic() - asked_at > max(MIN_QUERY_INTERVAL_S, self._queue.pause_s):
                states = [one.run_state for one in fetch_states_of_runs(runs, self._queue)]
                self._known[key] = time.monotonic(), states
            return states

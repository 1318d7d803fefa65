"""What each trainer rank is doing, so that one that hangs is named: which, where, for how long.

A rank that hangs shows as a collective that no rank comes out of, and after half an hour as torch's
timeout, on every rank but the one to blame. So each rank notes where it is, a thread puts that into
the store of the world now and then, and rank 0's thread looks who stands still.
"""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import msgspec

from areal_hpc.jobs.processes.native_call_threads import NativeCallThread

logger = logging.getLogger(__name__)

HANG_AFTER_S = 300.0
CHECK_INTERVAL_S = 5.0
_active_progress: "RankProgress | None" = None


class PlaceReport(msgspec.Struct, frozen=True, order=True):
    """Where a rank is."""

    entered: int
    """Places that it has been at. All ranks come to the same ones, in the same order."""
    place: str
    detail: str = ""
    """Within the place; ranks may differ."""


class RankProgress:
    """One rank's notes, and on rank 0 the watch over all ranks.

    Args:
        store: Of the world; its clients may be used from any thread.
        rank: This one.
        ranks: How many there are.
        on_hang: Called on rank 0, once each time that ranks hang.
        hang_s: Time at one place after which a rank hangs.
        check_interval_s: Time between two looks at the others.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        on_hang: Callable[[str], None] = lambda line: None,
        *,
        hang_s: float = HANG_AFTER_S,
        check_interval_s: float = CHECK_INTERVAL_S,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._on_hang, self._hang_s, self._check_interval_s = on_hang, hang_s, check_interval_s
        self._own = PlaceReport(0, "the start")
        self._seen: dict[int, tuple[PlaceReport, float]] = {}
        """Of each rank, and when it was first seen there."""
        self._hanging: dict[int, PlaceReport] = {}
        self._dumped: PlaceReport | None = None
        self._is_over = threading.Event()
        self._thread = NativeCallThread(self._run, "rank-progress")  # the store is native code

    def record_place(self, place_name: str) -> None:
        self._own = PlaceReport(self._own.entered + 1, place_name)

    def record_detail(self, detail: str) -> None:
        self._own = PlaceReport(self._own.entered, self._own.place, detail)

    def describe(self) -> str:
        """One line that names first the ranks that are behind all others."""
        now = time.monotonic()
        ordered = sorted(
            (report, rank, now - since) for rank, (report, since) in self._seen.items()
        ) or [(self._own, self._rank, 0.0)]
        parts = []
        for report, members in groupby(ordered, lambda one: one[0]):
            held = list(members)
            where = f"{report.place}, {report.detail}" if report.detail else report.place
            ranks, still_s = _format_ranks([one[1] for one in held]), min(one[2] for one in held)
            parts.append(f"{ranks} at {where} for {still_s:.0f} s")
        is_someone_behind = ordered[0][0].entered < ordered[-1][0].entered
        return ("behind all others: " if is_someone_behind else "") + "; ".join(parts)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Have the notes of this process go here, in the block."""
        global _active_progress
        _active_progress = self
        self._thread.start()
        try:
            yield
        finally:  # before the store goes, and the interpreter
            self._is_over.set()
            self._thread.join(2 * self._check_interval_s)
            _active_progress = None

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._check_interval_s):
                self.watch_once(time.monotonic())
        except RuntimeError as error:  # the store is gone, and the trainer with it
            logger.info("rank monitoring stopped: %s", error)

    def watch_once(self, now: float) -> None:
        """Publish where this rank is, and see where the others are."""
        self._store.set(f"progress/{self._rank}", msgspec.json.encode(self._own).decode())
        for rank in range(self._ranks) if self._rank == 0 else [self._rank]:
            if not self._store.check([f"progress/{rank}"]):
                continue
            report = msgspec.json.decode(self._store.get(f"progress/{rank}"), type=PlaceReport)
            if rank not in self._seen or self._seen[rank][0] != report:
                self._seen[rank] = (report, now)
        hanging = {
            rank: report
            for rank, (report, since) in self._seen.items()
            if now - since >= self._hang_s
        }
        if self._rank in hanging and hanging[self._rank] != self._dumped:
            self._dumped = hanging[self._rank]
            faulthandler.dump_traceback()  # where in the code, in this rank's own log
        if self._rank == 0 and hanging and hanging != self._hanging:
            line = self.describe()
            logger.warning("the trainer stands still: %s", line)
            self._on_hang(line)
        self._hanging = hanging


def _format_ranks(ranks: list[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def note_place_reached(place_name: str) -> None:
    if _active_progress is not None:
        _active_progress.record_place(place_name)


def note_detail(detail: str) -> None:
    if _active_progress is not None:
        _active_progress.record_detail(detail)


def describe_ranks() -> str:
    return _active_progress.describe() if _active_progress is not None else ""

"""What each trainer rank is doing, so that one that hangs is named: which, where, for how long.

A rank that hangs shows as a collective that no rank comes out of, and after half an hour as torch's
timeout, on every rank but the one to blame. So each rank notes where it is, a thread puts that into
the store of the world now and then, and rank 0's thread looks who stands still.
"""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import msgspec

from areal_hpc.jobs.processes.native_call_threads import NativeCallThread

logger = logging.getLogger(__name__)

HANG_AFTER_S = 300.0
"""Ranks that are at one place for so long are named."""
_CHECK_INTERVAL_S = 5.0
_active_progress: "RankProgress | None" = None


class PlaceReport(msgspec.Struct, frozen=True):
    """Where a rank is."""

    entered: int
    """Places that it has been at. All ranks come to the same ones, in the same order."""
    place: str
    detail: str = ""
    """Within the place; ranks may differ."""


class ObservedRank(msgspec.Struct, frozen=True):
    """A rank as rank 0 sees it."""

    rank: int
    report: PlaceReport
    still_s: float
    """Seconds since rank 0 saw it move."""


def describe_observed_ranks(ranks_seen: Sequence[ObservedRank]) -> str:
    """One line that names first the ranks that are behind all others. Pure."""
    by_place = sorted(ranks_seen, key=lambda one: (one.report.entered, one.report.detail, one.rank))
    parts = []
    for report, members in groupby(by_place, lambda one: one.report):
        held = list(members)
        ranks = _format_ranks([one.rank for one in held])
        where = f"{report.place}, {report.detail}" if report.detail else report.place
        parts.append(f"{ranks} at {where} for {min(one.still_s for one in held):.0f} s")
    is_someone_behind = len({one.report.entered for one in ranks_seen}) > 1
    return ("behind all others: " if is_someone_behind else "") + "; ".join(parts)


def _format_ranks(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


class RankProgress:
    """One rank's notes, and on rank 0 the watch over all ranks.

    Args:
        store: Of the world; its clients may be used from any thread.
        rank: This one.
        ranks: How many there are.
        on_hang: Told once of each time that ranks hang, on rank 0.
        hang_s: How long a rank may be at one place.
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
        check_interval_s: float = _CHECK_INTERVAL_S,
    ) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._on_hang, self._hang_s, self._check_interval_s = on_hang, hang_s, check_interval_s
        self._own = PlaceReport(0, "the start")
        self._seen: dict[int, tuple[PlaceReport, float]] = {}
        self._hanging: Mapping[int, PlaceReport] = {}
        self._dumped: PlaceReport | None = None
        self._is_over = threading.Event()
        self._thread = NativeCallThread(self._run, "rank-progress")  # the store is native code

    def start(self) -> None:
        self._thread.start()

    def record_place(self, place_name: str) -> None:
        self._own = PlaceReport(self._own.entered + 1, place_name)

    def record_detail(self, detail: str) -> None:
        self._own = PlaceReport(self._own.entered, self._own.place, detail)

    def describe(self) -> str:
        return describe_observed_ranks(self._list_observed_ranks(time.monotonic()))

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(2 * self._check_interval_s)

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._check_interval_s):
                self.publish_place_and_report_hangs(time.monotonic())
        except RuntimeError as error:  # the store is gone, and the trainer with it
            logger.info("ranks are not watched any more: %s", error)

    def publish_place_and_report_hangs(self, now: float) -> None:
        """Publish where this rank is, and see where the others are."""
        self._store.set(_build_key(self._rank), msgspec.json.encode(self._own).decode())
        for rank in range(self._ranks) if self._rank == 0 else [self._rank]:
            if not self._store.check([_build_key(rank)]):
                continue
            report = msgspec.json.decode(self._store.get(_build_key(rank)), type=PlaceReport)
            if rank not in self._seen or self._seen[rank][0] != report:
                self._seen[rank] = (report, now)
        still = [one for one in self._list_observed_ranks(now) if one.still_s >= self._hang_s]
        hanging = {one.rank: one.report for one in still}
        if self._rank in hanging and hanging[self._rank] != self._dumped:
            self._dumped = hanging[self._rank]
            faulthandler.dump_traceback()  # where in the code, in this rank's own log
        if self._rank == 0 and still and hanging != self._hanging:
            line = self.describe()
            logger.warning("the trainer stands still: %s", line)
            self._on_hang(line)
        self._hanging = hanging

    def _list_observed_ranks(self, now: float) -> list[ObservedRank]:
        return [
            ObservedRank(rank, report, now - since) for rank, (report, since) in self._seen.items()
        ] or [ObservedRank(self._rank, self._own, 0.0)]


def _build_key(rank: int) -> str:
    return f"progress/{rank}"


@contextmanager
def watch_ranks(progress: RankProgress) -> Iterator[None]:
    """Have `note_place_reached` and `note_detail` of this process go to it, in the block."""
    global _active_progress
    _active_progress = progress
    progress.start()
    try:
        yield
    finally:  # before the store goes, and the interpreter
        progress.close()
        _active_progress = None


def note_place_reached(place_name: str) -> None:
    if _active_progress is not None:
        _active_progress.record_place(place_name)


def note_detail(detail: str) -> None:
    if _active_progress is not None:
        _active_progress.record_detail(detail)


def describe_ranks() -> str:
    return _active_progress.describe() if _active_progress is not None else ""

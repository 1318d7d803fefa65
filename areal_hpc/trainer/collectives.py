"""Small collectives by which ranks agree, progress of each rank, and the report of a failure.

When one rank hangs, no rank leaves the next collective, and after half an hour torch's timeout
is raised on every rank but the one that caused it. Therefore each rank records the named place
that it has reached, a thread publishes it in the world's store, and rank 0 looks for laggards.
"""

import contextlib
import datetime
import faulthandler
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.errors import ArealError, ClusterError, LostTrainerRankError, OtherRankError
from areal_hpc.jobs.processes.native_call_threads import NativeCallThread
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.trainer.private_apis.torch_private import get_default_store
from areal_hpc.wire.decoding import decode_json

logger = logging.getLogger(__name__)
LOST_RANK_PATTERN = re.compile(
    "Connection (closed|reset) by peer|Broken pipe|Connection was likely closed|remote process exit"
    "|ncclRemoteError|NCCL communicator was aborted"
)
"""Messages of gloo, of a store or of NCCL on the ranks that outlive another rank."""
HUNG_PEER_PATTERN = re.compile(
    r"Timed out waiting \d+ms|[Cc]ollective operation timeout|Wait timeout after \d+ms"
)
"""Messages of gloo, of NCCL's watchdog or of a store on ranks that waited in vain for another."""
FAILED_RANK_COUNT_KEY = "failures"
"""Key of the counter of failed ranks, in the store that the world was opened with."""
FAILURE_REPORTED_KEY = "reported"
"""Key set there once a failed rank has found that it is the first, and will report."""
FAILURE_REPORT_TIMEOUT_S = 10.0
FILE_VISIBLE_TIMEOUT_S = 60.0
"""Seconds until a file has become visible on another node of a shared file system."""
READ_RETRY_S = 0.5

ResultT = TypeVar("ResultT")


def is_true_on_any_rank(flag: bool) -> bool:
    """Return whether the flag is true on any rank; the result is equal on all. A collective."""
    return bool(all_reduce_max(int(flag)))


def all_reduce_max(value: int) -> int:
    """Return the largest of the ranks' numbers, on every rank. A collective."""
    if dist.get_world_size() == 1:
        return value
    numbers = torch.tensor(value)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return int(numbers)


def broadcast_object(message: object, object_type: Any) -> Any:
    """Return rank 0's message, decoded by msgspec as this type, on every rank. A collective."""
    body = bytearray(msgspec.json.encode(message) if dist.get_rank() == 0 else b"")
    if dist.get_world_size() > 1:
        size = torch.tensor(len(body))
        dist.broadcast(size, src=0)
        body = body or bytearray(int(size))
        dist.broadcast(torch.frombuffer(body, dtype=torch.uint8), src=0)
    return decode_json(body, object_type)


def gather_objects_on_first_rank(message: object, object_type: Any) -> list[Any]:
    """Return all ranks' messages, decoded by msgspec, on rank 0; [] elsewhere. A collective."""
    body = msgspec.json.encode(message)
    if dist.get_world_size() == 1:
        return [decode_json(body, object_type)]
    is_first = dist.get_rank() == 0
    padded = torch.zeros(all_reduce_max(len(body)), dtype=torch.uint8)
    padded[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    received = [torch.empty_like(padded) for _ in range(dist.get_world_size() if is_first else 0)]
    dist.gather(padded, received if is_first else None)
    # JSON has no zero bytes.
    return [decode_json(data.numpy().tobytes().rstrip(b"\0"), object_type) for data in received]


def read_with_retries_on_all_ranks(
    read_file: Callable[[], ResultT], expected: type[ArealError]
) -> ResultT:
    """Call `read_file` until it fails on no rank; return its result. A collective.

    Raises:
        ArealError: The expected one, on all ranks: after a wait still no rank can read.
        ClusterError: This rank cannot read, another one can.
        OtherRankError: This rank can read, another one cannot.
    """
    give_up_at = time.monotonic() + FILE_VISIBLE_TIMEOUT_S
    while True:
        result, failure = None, None
        try:
            result = read_file()
        except expected as error:
            failure = error
        if not is_true_on_any_rank(failure is not None):
            return cast("ResultT", result)
        if is_true_on_any_rank(time.monotonic() >= give_up_at):
            if is_true_on_any_rank(failure is None):
                if failure is None:
                    raise OtherRankError
                problem = failure.problems[0]
                raise ClusterError(
                    f"{problem.message} (other ranks can read it)",
                    key=problem.key,
                    hint="check the mounts and the memory of this node",
                )
            assert failure is not None
            raise failure
        logger.info("not all ranks can read yet: %s", failure)
        time.sleep(READ_RETRY_S)


def raise_on_all_ranks(error: Exception | None) -> None:
    """Raise on all ranks if any of them has an error; else return on all. A collective.

    Raises:
        OtherRankError: Another rank has an error, this one has none.
    """
    if is_true_on_any_rank(error is not None):
        raise error or OtherRankError


HANG_AFTER_S = 300.0
CHECK_INTERVAL_S = 5.0
_active_progress: "RankProgress | None" = None


class PlaceReport(msgspec.Struct, frozen=True, order=True):
    entered: int
    """Number of places reached so far. All ranks reach the same ones, in the same order."""
    place: str
    detail: str = ""
    """Detail within the place; ranks may differ."""


class RankProgress:
    """One rank's progress, and on rank 0 the watch over all ranks.

    Args:
        store: Store of the world; its clients are thread-safe.
        rank: This rank.
        ranks: Number of ranks.
        on_hang: Called on rank 0, once each time that ranks hang.
        hang_s: Seconds at one place after which a rank counts as hanging.
        check_interval_s: Seconds between two checks of the others.
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
        """Last report of each rank, and the time at which it was first seen."""
        self._hanging: dict[int, PlaceReport] = {}
        self._dumped: PlaceReport | None = None
        self._is_over = threading.Event()
        self._thread = NativeCallThread(self._run, "rank-progress")  # the store is native code

    def record_place(self, place_name: str) -> None:
        self._own = PlaceReport(self._own.entered + 1, place_name)

    def record_detail(self, detail: str) -> None:
        self._own = PlaceReport(self._own.entered, self._own.place, detail)

    def describe(self) -> str:
        """Describe the ranks in one line that begins with those that are behind all others."""
        now = time.monotonic()
        ordered = sorted(
            (report, rank, now - since) for rank, (report, since) in self._seen.items()
        ) or [(self._own, self._rank, 0.0)]
        parts = []
        for report, members in groupby(ordered, lambda item: item[0]):
            group = list(members)
            where = f"{report.place}, {report.detail}" if report.detail else report.place
            ranks, still_s = (
                _format_ranks([item[1] for item in group]),
                min(item[2] for item in group),
            )
            parts.append(f"{ranks} at {where} for {still_s:.0f} s")
        is_someone_behind = ordered[0][0].entered < ordered[-1][0].entered
        return ("behind all others: " if is_someone_behind else "") + "; ".join(parts)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Make this the process's active progress during the block."""
        global _active_progress
        _active_progress = self
        self._thread.start()
        try:
            yield
        finally:  # before the store and the interpreter end
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
        """Publish this rank's place, and read those of the others."""
        self._store.set(f"progress/{self._rank}", msgspec.json.encode(self._own).decode())
        for rank in range(self._ranks) if self._rank == 0 else [self._rank]:
            if not self._store.check([f"progress/{rank}"]):
                continue
            report = decode_json(self._store.get(f"progress/{rank}"), PlaceReport)
            if rank not in self._seen or self._seen[rank][0] != report:
                self._seen[rank] = (report, now)
        hanging = {
            rank: report
            for rank, (report, since) in self._seen.items()
            if now - since >= self._hang_s
        }
        if self._rank in hanging and hanging[self._rank] != self._dumped:
            self._dumped = hanging[self._rank]
            faulthandler.dump_traceback()  # the place in the code, in this rank's own log
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


@contextmanager
def report_first_failure() -> Iterator[None]:
    """Let only the first rank that fails in the block report its error.

    The end of a rank breaks the collectives of all others, which would report lost connections;
    they exit quietly instead, with the exit code of a stop.

    Raises:
        SystemExit: Another rank failed first.
        LostTrainerRankError: Another rank vanished without a report.
    """
    try:
        yield
    except Exception as error:  # boundary: raised again, unless another rank reports
        if isinstance(error, OtherRankError):
            with contextlib.suppress(RuntimeError):
                get_default_store().wait(
                    [FAILURE_REPORTED_KEY], datetime.timedelta(seconds=FAILURE_REPORT_TIMEOUT_S)
                )
        if isinstance(error, OtherRankError) or not _claim_first_failure():
            logger.info("exiting: another rank failed")
            raise SystemExit(STOPPED_EXIT_CODE) from error
        raise_for_lost_rank(error)
        raise


def raise_for_lost_rank(error: Exception) -> None:
    """Raise a LostTrainerRankError if another rank ended, or hangs, and so caused `error`."""
    if isinstance(error, RuntimeError) and HUNG_PEER_PATTERN.search(str(error)):
        raise LostTrainerRankError(
            f"a trainer rank hangs: {describe_ranks() or 'which one is unknown'} ({error})",
            hint="read the stack in that rank's log; nccl_flight_record_rank_* in the logs have "
            "the last collectives of each rank",
        ) from error
    if isinstance(error, RuntimeError) and LOST_RANK_PATTERN.search(str(error)):
        raise LostTrainerRankError(
            f"another trainer rank disappeared: {error}",
            hint="read the other ranks' logs; check dmesg for the out-of-memory killer",
        ) from error


def _claim_first_failure() -> bool:
    if dist.get_world_size() == 1:
        return True
    store = get_default_store()
    try:
        is_first = store.add(FAILED_RANK_COUNT_KEY, 1) == 1
    except RuntimeError:  # rank 0 held the store, and has ended
        return False
    # A separate key: a waiting rank wakes before `add` is answered, and if that is rank 0, it may
    # close the store in between.
    with contextlib.suppress(RuntimeError):
        store.set(FAILURE_REPORTED_KEY, "")
    return bool(is_first)

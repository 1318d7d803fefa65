"""How the end of a broadcast is learned, and what became of it.

Gloo tells when an operation is over. NCCL does not: what torch calls its future is done once the
operation is queued, so it is asked. For that one thread is enough, however many groups there are;
it ends with the last operation, for a process that ends beside it ends at once.
"""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import torch.distributed as dist

from areal_hpc.jobs.processes.native_call_threads import NativeCallThread

_POLL_S = 0.0005
"""Period of the questions to NCCL; a bucket of 512 MiB takes ten milliseconds or more."""


class CollectiveWorkPoller:
    """One thread that asks about all operations under way, as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[tuple[Sequence[dist.Work], Future[None]]] = []
        self._is_polling = False

    def watch_works(self, collective_works: Sequence[dist.Work]) -> Future[None]:
        """Is done when all works are, well or not. Cancel it to let go of them."""
        over: Future[None] = Future()
        with self._lock:
            self._pending.append((collective_works, over))
            if not self._is_polling:
                self._is_polling = True
                NativeCallThread(self._run, "nccl-poller").start()
        return over

    def _run(self) -> None:
        while True:
            with self._lock:
                pending = list(self._pending)
            ended = {id(over) for works, over in pending if _resolve_if_over(works, over)}
            with self._lock:
                self._pending = [one for one in self._pending if id(one[1]) not in ended]
                if not self._pending:
                    self._is_polling = False
                    return
            time.sleep(_POLL_S)


def watch_gloo_works(collective_works: Sequence[dist.Work]) -> Future[None]:
    """Is done when gloo has told of all works, well or not."""
    over: Future[None] = Future()
    lock, left = threading.Lock(), [len(collective_works)]

    def count(_: object) -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            _resolve_future(over)

    for work in collective_works:
        work.get_future().add_done_callback(count)
    return over


def raise_if_work_failed(work: dist.Work) -> None:
    """Raise what went wrong with an operation that is over.

    `wait` does not: for NCCL it orders streams, and says that all is well.

    Raises:
        RuntimeError: The operation failed.
    """
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error))


def _resolve_if_over(collective_works: Sequence[dist.Work], completion: Future[None]) -> bool:
    if completion.cancelled():
        return True
    try:
        if not all(work.is_completed() for work in collective_works):
            return False
    except RuntimeError as error:
        _resolve_future(completion, error)
    else:
        _resolve_future(completion)
    return True


def _resolve_future(completion: Future[None], error: RuntimeError | None = None) -> None:
    if not completion.set_running_or_notify_cancel():
        return
    if error is None:
        completion.set_result(None)
    else:
        completion.set_exception(error)

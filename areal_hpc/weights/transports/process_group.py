"""Trainer's end of one update process group.

SGLang joins with `init_custom_process_group` (sglang/srt/utils/common.py): a TCP store, a
prefix of the group's name, and torch's own group constructor without a default group. The
same steps are taken here, because both ends must derive the same store keys. Other than
SGLang, every wait here ends: an operation that does not finish in time, or that has become
pointless because a receiver refused, is given up and the group is void.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_hpc.errors import WeightSyncError

ResultT = TypeVar("ResultT")

_REFUSAL_POLL_S = 0.02
"""Period of the question to members whether they refuse."""
_NCCL_POLL_S = 0.0002
"""Period of the questions to NCCL."""


class UpdateProcessGroup:
    """Rank 0 of a group whose other ranks are the tensor-parallel ranks of replicas."""

    def __init__(self, name: str, host: str, world_size: int, backend: str, timeout_s: float):
        self.name = name
        self.host = host
        self.world_size = world_size
        self.backend = backend
        self._timeout_s = timeout_s
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.port: int = self._listener.getsockname()[1]
        """Where the store listens, on `host` alone: it knows no passwords."""
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # documented, but not in its stubs
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        self._group: dist.ProcessGroup | None = None

    def join(self, refused: Callable[[], bool]) -> None:
        """Wait until every rank is there.

        Raises:
            WeightSyncError: Not all came in time, or `refused` said that a member will not come.
        """
        # The constructor blocks in C++; a thread of its own lets a refusal end the wait.
        forming = _start_daemon_thread(self._construct_group)
        self._wait_until(
            lambda wait_s: not wait([forming], wait_s).not_done,
            refused,
            "the process group did not form",
            _REFUSAL_POLL_S,
        )
        try:
            self._group = forming.result()
        except RuntimeError as error:
            raise WeightSyncError(f"group {self.name} did not form: {error}") from error

    def _construct_group(self) -> dist.ProcessGroup:
        group, _ = c10d._new_process_group_helper(
            self.world_size,
            0,
            [],
            c10d.Backend(self.backend),
            c10d.PrefixStore(self.name, self._store),
            group_name=c10d.GroupName(self.name),
            timeout=timedelta(seconds=self._timeout_s),
        )
        assert isinstance(group, dist.ProcessGroup)
        # torch's broadcast translates ranks through this table.
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group

    def broadcast(self, messages: Sequence[torch.Tensor], refused: Callable[[], bool]) -> None:
        """Send a bucket's messages, contiguous and on the backend's device, to every member.

        Raises:
            WeightSyncError: The send failed, or a member did not take it in time or at all.
        """
        assert self._group is not None, "join first"
        try:
            works = [
                dist.broadcast(message, src=0, group=self._group, async_op=True)
                for message in messages
            ]
            # Gloo tells when a message has left; NCCL only that it is queued, and must be asked.
            trouble = "the broadcast did not complete"
            left = [_wrap_work_in_future(work) for work in works]
            self._wait_until(
                lambda wait_s: not wait(left, wait_s).not_done, refused, trouble, _REFUSAL_POLL_S
            )
            self._wait_until(
                lambda wait_s: _poll_completion(works, wait_s), refused, trouble, _NCCL_POLL_S
            )
            for work in works:
                work.wait()
        except (RuntimeError, dist.DistBackendError) as error:
            raise WeightSyncError(f"the broadcast in group {self.name} failed: {error}") from error

    def _wait_until(
        self,
        done: Callable[[float], bool],
        refused: Callable[[], bool],
        trouble: str,
        look_s: float,
    ) -> None:
        """Wait until `done`, which may itself wait for as long as it is told, is true."""
        give_up_at = time.monotonic() + self._timeout_s
        while not done(look_s):
            if refused():
                raise WeightSyncError(f"{trouble}: a member reported failure (group {self.name})")
            if time.monotonic() >= give_up_at:
                raise WeightSyncError(
                    f"{trouble} within {self._timeout_s:.0f} s (group {self.name})"
                )

    def close(self) -> None:
        """Leave in order. Only when nothing is under way, else this waits for it."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave without waiting; members that wait for bytes get an error instead.

        Gloo takes until the deadline of an operation under way to let go of it, so it is left
        to a thread.
        """
        group, self._group = self._group, None
        if group is None:
            return

        def destroy() -> None:
            group.abort()
            dist.destroy_process_group(group)

        _start_daemon_thread(destroy)


def _wrap_work_in_future(work: dist.Work) -> Future[None]:
    """Is done when torch says that the operation is, well or not."""
    future: Future[None] = Future()
    work.get_future().add_done_callback(lambda _: future.set_result(None))
    return future


def _poll_completion(works: Sequence[dist.Work], wait_s: float) -> bool:
    if all(work.is_completed() for work in works):
        return True
    time.sleep(wait_s)
    return False


def _start_daemon_thread(work: Callable[[], ResultT]) -> Future[ResultT]:
    """Run `work` in a thread that never keeps the process from exiting."""
    future: Future[ResultT] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # boundary: carried to the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="update-group", daemon=True).start()
    return future

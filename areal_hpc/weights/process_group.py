"""Trainer's end of the process group of one weight update.

SGLang joins with `init_custom_process_group` (sglang/srt/utils/common.py): a TCP store, a
prefix of the group's name, and torch's own group constructor without a default group. This
module takes the same steps, because both ends must derive the same store keys. Unlike in
SGLang, every wait here ends: an operation that does not finish in time, or that has become
pointless because a receiver refused, is abandoned, and the group can no longer be used.

Over NCCL the constructor joins no rank: the first broadcast makes the communicator, in a call that
lasts until every member has made the same call. Therefore broadcasts begin in a separate thread.
And torch's watchdog must not watch these groups: see `TRAINER_WEIGHT_UPDATE_VARIABLES`.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_hpc.errors import WeightSyncError
from areal_hpc.jobs.config import TRAINER_WEIGHT_UPDATE_VARIABLES
from areal_hpc.jobs.processes.native_call_threads import start_native_call

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

THREAD_NAME = "update-group"
_POLL_S = 0.0005
"""Seconds between two checks of whether an operation is over or a member refuses; a bucket of
512 MiB over NCCL takes ten milliseconds or more."""


def exempt_later_groups_from_nccl_watchdog() -> None:
    """Exempt the NCCL groups that this process makes from now on from torch's watchdog.

    Torch reads these variables when it makes a group. The trainer's world already exists, and
    stays watched.
    """
    os.environ.update(TRAINER_WEIGHT_UPDATE_VARIABLES)


def get_torch_group_timeout_s(backend: str, timeout_s: float) -> float:
    """Return torch's deadline for a group's operations; `timeout_s` is the deadline of this module.

    NCCL's must never come first. Gloo's is the only end of an operation that was abandoned.
    """
    return timeout_s if backend == "gloo" else 4 * timeout_s + 60


class UpdateProcessGroup:
    """Rank 0 of a group whose other ranks are the tensor-parallel ranks of replicas."""

    def __init__(self, group_name: str, host: str, world_size: int, backend: str, timeout_s: float):
        self.name = group_name
        self.host = host
        self.world_size = world_size
        self.backend = backend
        self._timeout_s = timeout_s
        self._listener = socket.create_server((host, 0), backlog=world_size)
        self.port: int = self._listener.getsockname()[1]
        """Port of the store, which listens on `host` only: it has no passwords."""
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # documented, but not in its stubs
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        self._group: dist.ProcessGroup | None = None

    def join(self, is_refused: Callable[[], bool]) -> None:
        """Wait until every rank has joined; over NCCL, until this rank has.

        Raises:
            WeightSyncError: A rank was too late, or `is_refused` returned True.
        """
        failure, give_up_at = "the process group did not form", time.monotonic() + self._timeout_s
        if self.backend == "gloo":
            # Its constructor waits for the members in C++, which no exit of the process interrupts.
            self._wait_until(
                lambda: self._store.num_keys() >= self.world_size - 1,
                is_refused,
                failure,
                give_up_at,
            )
        forming = start_native_call(self._construct_group, THREAD_NAME)
        self._await_future(forming, is_refused, failure, give_up_at)
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
            timeout=timedelta(seconds=get_torch_group_timeout_s(self.backend, self._timeout_s)),
        )
        assert isinstance(group, dist.ProcessGroup)
        # torch's broadcast translates ranks through this table.
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group

    def broadcast(self, messages: Sequence[torch.Tensor], is_refused: Callable[[], bool]) -> None:
        """Send a bucket's messages, contiguous and on the backend's device, to every member.

        Raises:
            WeightSyncError: The send failed, or a member refused it or did not receive it in time.
        """
        assert self._group is not None, "join first"
        group, failure = self._group, "the broadcast did not complete"
        give_up_at = time.monotonic() + self._timeout_s

        def begin() -> list[dist.Work]:
            return [
                dist.broadcast(message, src=0, group=group, async_op=True) for message in messages
            ]

        try:
            begun = start_native_call(begin, THREAD_NAME)
            self._await_future(begun, is_refused, failure, give_up_at)
            works = begun.result()
            self._wait_until(
                lambda: all(work.is_completed() for work in works), is_refused, failure, give_up_at
            )
            for work in works:
                # For NCCL `wait` orders streams and reports success in any case.
                if self.backend != "gloo" and (error := work.exception()) is not None:
                    raise RuntimeError(str(error))
                work.wait()
        except (RuntimeError, dist.DistBackendError) as error:
            raise WeightSyncError(f"the broadcast in group {self.name} failed: {error}") from error

    def _await_future(
        self,
        future: Future[ResultT],
        is_refused: Callable[[], bool],
        failure_text: str,
        give_up_at: float,
    ) -> None:
        try:
            self._wait_until(future.done, is_refused, failure_text, give_up_at)
        except WeightSyncError:
            future.cancel()  # its result is no longer needed
            raise

    def _wait_until(
        self,
        is_over: Callable[[], bool],
        is_refused: Callable[[], bool],
        failure_text: str,
        give_up_at: float,
    ) -> None:
        while not is_over():
            if is_refused():
                raise WeightSyncError(
                    f"{failure_text}: a member reported failure (group {self.name})"
                )
            if time.monotonic() >= give_up_at:
                raise WeightSyncError(
                    f"{failure_text} within {self._timeout_s:.0f} s (group {self.name})"
                )
            time.sleep(_POLL_S)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave without waiting; members that wait for bytes get an error instead.

        Gloo releases a running operation only at its deadline, and NCCL a communicator that is
        being made only when it is complete or broken: therefore a thread does it.
        """
        group, self._group = self._group, None
        if group is None:
            return

        def destroy() -> None:
            try:
                group.abort()
            except RuntimeError as error:
                logger.info("group %s could not be aborted: %s", self.name, error)
            dist.destroy_process_group(group)

        start_native_call(destroy, THREAD_NAME)

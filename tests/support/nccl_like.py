"""A process group that fails as NCCL's does under torch, for machines without a GPU.

Behavior that it shares with torch's (`torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp`):

- Its constructor joins nobody. The first collective makes the communicator, in a call that lasts
  until all ranks have made it; neither a deadline nor an abort ends that call.
- A work that failed is completed. `wait` returns normally, `exception` returns the error.
- A receiver whose process dies breaks the communicator. One that hangs leaves the work under way.
- A watchdog ends the process when a work fails or is late, unless `TORCH_NCCL_BLOCKING_WAIT` was
  set when the group was made. Here it notes what it would have done in `ENDED`. Error handling that
  is off does not help: the failure is made known to the monitor of the process's first group, which
  ends the process.

Bytes travel through the group's store.
"""

import os
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d as c10d

BACKEND = "nccl_like"
ENDED: list[str] = []
"""Reasons for which processes would have ended."""
_POLL_S = 0.005
_ALL_OVER = threading.Event()
"""Set when a test is over: calls that would last for ever end."""


class _Work(Work):
    """One broadcast on the sender's side."""

    def __init__(self, group: "NcclLikeGroup", number: int) -> None:
        super().__init__()
        self.began = time.monotonic()
        self._group = group
        self._number = number
        self._error: RuntimeError | None = None

    def is_completed(self) -> bool:
        if self._error is None and (broken := self._group.find_broken_rank()) is not None:
            self._error = RuntimeError(
                f"NCCL error: remote process exited or there was a network error (rank {broken})"
            )
        return self._error is not None or self._group.is_taken(self._number)

    def exception(self) -> RuntimeError | None:
        self.is_completed()
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class NcclLikeGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # as torch lets Python groups
        self._store, self._rank, self._ranks = store, rank, size
        self._timeout_s = timeout.total_seconds()
        self._sent = 0
        self._is_aborted = False
        self._name = ""
        self._works: list[_Work] = []
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT") != "1" and rank == 0:
            threading.Thread(target=self._watch, daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return BACKEND

    def setGroupName(self, name: str) -> None:  # noqa: N802  (torch's name)
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        return self._name

    def broadcast(  # type: ignore[override]  # the one form that torch calls
        self, tensors: list[torch.Tensor], options: Any = None
    ) -> _Work:
        (tensor,) = tensors
        self.make_communicator()
        self._sent += 1
        work = _Work(self, self._sent)
        self._works.append(work)
        self._store.set(f"bytes/{self._sent}", tensor.view(torch.uint8).numpy().tobytes())
        return work

    def receive(self, size_bytes: int) -> bytes:
        """Receive the next bytes of the first rank, on another rank."""
        self.make_communicator()
        self._sent += 1
        key = f"bytes/{self._sent}"
        while not self._store.check([key]):
            _pause_or_end()
        content: bytes = self._store.get(key)
        assert len(content) == size_bytes
        self._store.set(f"taken/{self._sent}/{self._rank}", "")
        return content

    def make_communicator(self) -> None:
        """Return when every rank has called it."""
        self._store.set(f"member/{self._rank}", "")
        members = [f"member/{rank}" for rank in range(self._ranks)]
        while not self._store.check(members):
            _pause_or_end()

    def die(self) -> None:
        self._store.set(f"dead/{self._rank}", "")

    def find_broken_rank(self) -> int | None:
        """A rank whose process has ended, if its connections existed."""
        for rank in range(self._ranks):
            if self._store.check([f"dead/{rank}"]):
                return rank
        return None

    def is_taken(self, number: int) -> bool:
        return bool(self._store.check([f"taken/{number}/{rank}" for rank in range(1, self._ranks)]))

    def abort(self) -> None:
        self._is_aborted = True

    def shutdown(self) -> None:
        self._is_aborted = True

    def _watch(self) -> None:
        while not self._is_aborted and not _ALL_OVER.wait(_POLL_S):
            for work in self._works:
                if work.exception() is not None:
                    ENDED.append(f"{self._name}: {work.exception()}")
                    return
                late = time.monotonic() - work.began > self._timeout_s
                if late and not work.is_completed():
                    ENDED.append(f"{self._name}: collective operation timeout")
                    return


def _pause_or_end() -> None:
    if _ALL_OVER.wait(_POLL_S):
        raise RuntimeError("the test is over")


def register() -> None:
    """Register the backend with torch, once."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, NcclLikeGroup, devices="cpu")
    _ALL_OVER.clear()
    ENDED.clear()


def end_all() -> None:
    _ALL_OVER.set()


def join_as_member(host: str, port: int, group_name: str, rank: int, size: int) -> NcclLikeGroup:
    """Join a receiver's end, in this process too: torch's registry takes a name only once."""
    client = dist.TCPStore(host, port, None, False)  # type: ignore[attr-defined]
    store: Any = client
    for prefix in (group_name, f"{group_name}/", "cpu/"):
        store = c10d.PrefixStore(prefix, store)
    return NcclLikeGroup(store, rank, size, timedelta(minutes=30))

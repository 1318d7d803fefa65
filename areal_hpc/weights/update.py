"""One weight update of all replica groups, failures isolated per group."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.weights.update_session import UpdateSession

log = logging.getLogger(__name__)

SessionT = TypeVar("SessionT", bound=UpdateSession)
SessionStep = Callable[[SessionT], None]


class GroupUpdate(Generic[SessionT]):
    """One update under way: the groups that still take part, and why others do not.

    Args:
        pool: Has a thread for each group.
        get_step_deadline_s: What a group may take for one step; one that takes longer drops out.
    """

    def __init__(self, pool: ThreadPoolExecutor, step_s: float) -> None:
        self._pool = pool
        self._step_s = step_s
        self._step_name = ""
        self._step_ends_at = 0.0
        self.live: list[SessionT] = []
        self.failed: dict[ReplicaKey, WeightSyncError] = {}

    def each(self, name: str, step: SessionStep[SessionT]) -> None:
        """Take one step with all groups at once; those that fail it drop out."""
        self.settle(self.start(name, step))

    def start(self, name: str, step: SessionStep[SessionT]) -> list[tuple[SessionT, Future[None]]]:
        """Begin one step with all groups; `settle` ends it."""
        self._step_name = name
        self._step_ends_at = time.monotonic() + self._step_s
        return [(swap, self._pool.submit(step, swap)) for swap in self.live]

    def settle(self, steps: list[tuple[SessionT, Future[None]]]) -> None:
        """Wait for the step of each group; those that failed, or are late, drop out."""
        failures: dict[SessionT, WeightSyncError] = {}
        for swap, step in steps:
            try:
                step.result(max(0.0, self._step_ends_at - time.monotonic()))
            except TimeoutError:
                failures[swap] = WeightSyncError(
                    f"{self._step_name} took longer than {self._step_s:g} s"
                )
            except WeightSyncError as error:
                failures[swap] = error
        self._drop(failures)

    def give_up(self) -> None:
        """The sender itself failed: nobody got complete weights."""
        self._drop({swap: WeightSyncError("the sender failed") for swap in self.live})

    def _drop(self, failures: Mapping[SessionT, WeightSyncError]) -> None:
        for swap, error in failures.items():
            log.warning("excluded from this update: %s", error)
            self.live.remove(swap)
            for key in swap.keys:
                self.failed[key] = WeightSyncError(f"{key} did not receive the update: {error}")
        # All at once: each may take seconds to be told, and the groups that go on wait.
        for told in [self._pool.submit(swap.give_up) for swap in failures]:
            told.result()

"""One update of many groups: every step with all of them at once, failures group by group."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.weights.swap import GroupSwap

log = logging.getLogger(__name__)

Step = Callable[[GroupSwap], None]


class Attempt:
    """One update under way: the groups that still take part, and why others do not."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self.live: list[GroupSwap] = []
        self.failed: dict[ReplicaKey, WeightSyncError] = {}

    def tp_sizes(self) -> set[int]:
        """Tensor-parallel sizes of the replicas that take part."""
        return {key.tp for swap in self.live for key in swap.keys}

    def each(self, step: Step) -> None:
        """Take one step with all groups at once; those that fail it drop out."""
        self.settle(self.start(step))

    def start(self, step: Step) -> list[tuple[GroupSwap, Future[None]]]:
        """Begin one step with all groups; `settle` ends it."""
        return [(swap, self._pool.submit(step, swap)) for swap in self.live]

    def settle(self, steps: list[tuple[GroupSwap, Future[None]]]) -> None:
        """Wait for the step of each group; those that failed drop out."""
        for swap, step in steps:
            try:
                step.result()
            except WeightSyncError as error:
                self._drop(swap, error)

    def give_up(self) -> None:
        """The sender itself failed: nobody got complete weights."""
        for swap in [*self.live]:
            self._drop(swap, WeightSyncError("the sender failed"))

    def _drop(self, swap: GroupSwap, error: WeightSyncError) -> None:
        log.warning("left out of this update: %s", error)
        self.live.remove(swap)
        for key in swap.keys:
            self.failed[key] = WeightSyncError(f"{key} did not get the update: {error}")
        swap.give_up()

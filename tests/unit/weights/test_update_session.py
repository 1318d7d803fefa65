"""Steps of an update: what goes wrong in one group is not the others' trouble."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from areal_hpc.weights.discovery import ReplicaKey
from areal_hpc.weights.update import Update


class Session:
    def __init__(self, cell: str) -> None:
        self.keys = [ReplicaKey(cell, 0, 1, 1, "", 0.0)]
        self.is_abandoned = False

    def abandon_and_fence(self) -> None:
        self.is_abandoned = True


def test_an_error_that_nobody_foresaw_costs_its_group_alone() -> None:
    odd, well = Session("cell-0"), Session("cell-1")

    def step(session: Any) -> None:
        if session is odd:
            raise IndexError("list index out of range")

    with ThreadPoolExecutor(2) as pool:
        update: Update[Any] = Update(pool, 30.0)
        update.live = [odd, well]
        update.run_step("verify", step)
    assert update.live == [well]
    assert (odd.is_abandoned, well.is_abandoned) == (True, False)
    (error,) = update.failed.values()
    assert "verify failed: IndexError" in str(error)

"""The poller of NCCL's operations: one thread, as long as there is something to ask about."""

import threading
from typing import Any, cast

import pytest

from areal_hpc.jobs.processes.native_call_threads import list_native_calls
from areal_hpc.weights.transports.completion import CollectiveWorkPoller
from tests.support.deadlines import scaled
from tests.support.waiting import wait_for


class ScriptedWork:
    """An operation as torch has it, of another library's process group."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.trouble: RuntimeError | None = None

    def is_completed(self) -> bool:
        if self.trouble is not None:
            raise self.trouble
        return self.ended.is_set()


def count_pollers() -> int:
    return list_native_calls().count("nccl-poller")


def test_the_poller_is_a_native_call_only_while_operations_are_under_way() -> None:
    """A process that ends beside one ends at once, whatever else there is to be done."""
    poller, before = CollectiveWorkPoller(), count_pollers()
    works = [ScriptedWork(), ScriptedWork(), ScriptedWork()]
    over = [poller.watch_works(cast("Any", [one])) for one in works]
    assert count_pollers() == before + 1
    works[0].ended.set()
    over[0].result(scaled(60))
    assert not over[1].done()
    works[1].trouble = RuntimeError("NCCL communicator was aborted")
    with pytest.raises(RuntimeError, match="aborted"):
        over[1].result(scaled(60))
    over[2].cancel()
    wait_for(lambda: count_pollers() == before)
    again = ScriptedWork()
    again.ended.set()
    poller.watch_works(cast("Any", [again])).result(scaled(60))
    wait_for(lambda: count_pollers() == before)

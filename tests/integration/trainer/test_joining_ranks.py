"""Ranks that join wait for one that never comes no longer than for rank 0, and end at a stop.

A rank that leaves knows whether the groups are still there.
"""

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist

from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node import TaskPosition
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.trainer import process_groups
from tests.support.waiting import wait_for

RANKS = 3


class HandClock:
    """The module `time` as far as joining reads it: it is moved by hand."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def join(rank: int, directory: Path, stop: threading.Event) -> Future[object]:
    """Join in a thread, which a rank that waits for ever would not keep from ending the tests."""
    ended: Future[object] = Future()

    def run() -> None:
        position = TaskPosition(rank, RANKS, rank, 0)
        try:
            process_groups.join_process_groups(
                position, ParallelConfig(dp=RANKS), "cpu", directory, is_cancelled=stop.is_set
            )
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended


def test_ranks_give_up_a_rank_that_does_not_come_and_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr(process_groups, "time", clock)
    joined = [join(rank, tmp_path, threading.Event()) for rank in (0, 1)]
    wait_for(lambda: count_arrived_ranks(tmp_path) == 2, 60.0)
    assert not any(one.done() for one in joined)
    clock.now_s = process_groups.JOIN_RANKS_TIMEOUT_S
    wait_for(lambda: all(one.done() for one in joined), 60.0)
    for one in joined:
        with pytest.raises(ClusterError, match=r"of 3 trainer ranks .* within 300 s: 2\n"):
            one.result()


def count_arrived_ranks(directory: Path) -> int:
    """The ranks that have told rank 0's store of themselves; 0 as long as there is none."""
    endpoint = rendezvous.find_endpoint(directory, rendezvous.RANK_STORE_SERVICE)
    if endpoint is None:
        return 0
    host, _, port = endpoint.url.removeprefix("tcp://").rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
    return int(store.add(process_groups.ARRIVED_RANK_COUNT_KEY, 0))

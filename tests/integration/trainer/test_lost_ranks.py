"""Waiting ranks name the ranks that never join or that hang."""

import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import ClusterError, LostTrainerRankError
from areal_hpc.jobs.node import TaskPosition
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.trainer import process_groups
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

RANKS = 3


class HandClock:
    """The module `time` as joining reads it, moved by hand."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def join(rank: int, directory: Path, stop: threading.Event) -> Future[object]:
    """Join in a thread that cannot keep the tests from ending."""
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
    assert not any(future.done() for future in joined)
    clock.now_s = process_groups.JOIN_RANKS_TIMEOUT_S
    wait_for(lambda: all(future.done() for future in joined), 60.0)
    for future in joined:
        with pytest.raises(ClusterError, match=r"of 3 trainer ranks .* within 300 s: 2\n"):
            future.result()


def count_arrived_ranks(directory: Path) -> int:
    """Count the ranks that have announced themselves in rank 0's store, if it exists."""
    endpoint = rendezvous.find_endpoint(directory, rendezvous.RANK_STORE_SERVICE)
    if endpoint is None:
        return 0
    host, _, port = endpoint.url.removeprefix("tcp://").rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
    return int(store.add(process_groups.ARRIVED_RANK_COUNT_KEY, 0))


RANK = """
import logging, sys, time
from datetime import timedelta

import torch.distributed as dist

from areal_hpc.errors import LostTrainerRankError
from areal_hpc.jobs.processes.native_call_threads import (
    exit_beside_native_calls, note_library_threads
)
from areal_hpc.trainer.collectives import is_true_on_any_rank, raise_for_lost_rank
from areal_hpc.trainer.collectives import RankProgress, note_detail, note_place_reached
from tests.support.deadlines import Deadline, scaled

logging.basicConfig(stream=sys.stderr)
rank, path = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(path, 2)
store.add("imported", 1)
deadline = Deadline(60)
while store.add("imported", 0) < 2:  # which takes as long as the machine likes
    assert not deadline.is_over(), "the other rank did not come"
    time.sleep(0.05)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=scaled(6))
)

def hang():
    note_detail("forward of micro-batch 2")
    time.sleep(600)  # until it is killed

def work():
    note_place_reached("forward passes")
    if rank == 1:
        hang()
    note_place_reached("the optimizer's step")
    try:
        is_true_on_any_rank(False)
    except RuntimeError as error:
        raise_for_lost_rank(error)

progress = RankProgress(store, rank, 2, hang_s=scaled(1.0), check_interval_s=0.1)
with exit_beside_native_calls():
    try:
        note_library_threads("torch.distributed")
        with progress.watch():
            work()
    except LostTrainerRankError as lost:
        print(lost.problems[0].message, flush=True)
        sys.exit(lost.exit_code)
"""


def test_the_rank_that_waits_names_the_one_that_hangs_and_where(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    meeting = str(tmp_path / "store")
    with subprocess.Popen(
        [*command, "1", meeting], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True
    ) as hanging:
        try:
            waiting = subprocess.run(
                [*command, "0", meeting],
                cwd=CHECKOUT,
                capture_output=True,
                text=True,
                timeout=scaled(120),
            )
        finally:
            hanging.kill()  # otherwise the end of this block would wait until it has slept
        assert hanging.stderr is not None
        stacks = hanging.stderr.read()
    assert waiting.returncode == LostTrainerRankError.exit_code, waiting.stderr + stacks
    location = "behind all others: rank 1 at forward passes, forward of micro-batch 2 for "
    assert f"a trainer rank hangs: {location}" in waiting.stdout
    assert f"the trainer stands still: {location}" in waiting.stderr
    assert "in hang" in stacks, "its stack, in its own log"

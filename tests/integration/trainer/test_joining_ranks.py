"""Ranks that join wait for one that never comes no longer than for rank 0, and end at a stop."""

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from areal_hpc.trainer.model.cpu import megatron_cpu  # noqa: F401  (before anything of Megatron)

# isort: split
from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node.topology import TaskPosition
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.trainer import process_groups
from tests.support.waiting import wait_for

RANKS = 3


def join(rank: int, directory: Path, stop: threading.Event) -> Future[object]:
    """Join in a thread, which a rank that waits for ever would not keep from ending the tests."""
    ended: Future[object] = Future()

    def run() -> None:
        position = TaskPosition(rank, RANKS, rank, 0)
        try:
            process_groups.init_process_groups(
                position, ParallelConfig(dp=RANKS), "cpu", directory, is_cancelled=stop.is_set
            )
        except Exception as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return ended


def test_ranks_give_up_a_rank_that_does_not_come_and_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "JOIN_RANKS_TIMEOUT_S", 5.0)
    joined = [join(rank, tmp_path, threading.Event()) for rank in (0, 1)]
    wait_for(lambda: all(one.done() for one in joined), 60.0)
    for one in joined:
        with pytest.raises(ClusterError, match=r"of 3 trainer ranks .* within 5 s: 2\n"):
            one.result()


def test_a_stop_ends_the_wait_for_other_ranks(tmp_path: Path) -> None:
    stop = threading.Event()
    first = join(0, tmp_path, stop)
    wait_for(lambda: any(tmp_path.iterdir()), 60.0)
    stop.set()
    wait_for(first.done, 60.0)
    with pytest.raises(ClusterError, match="rank 0 was stopped while it waited for other ranks"):
        first.result()

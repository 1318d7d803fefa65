"""Which rank hangs, where, for how long."""

import faulthandler
import logging

import pytest
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import LostTrainerRankError
from areal_hpc.trainer import rank_progress
from areal_hpc.trainer.collectives import raise_for_lost_rank
from areal_hpc.trainer.rank_progress import RankProgress


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    dumps: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda: dumps.append("stacks"))
    return dumps


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def ranks(told: list[str]) -> list[RankProgress]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [RankProgress(store, rank, 3, told.append, hang_s=60) for rank in range(3)]


def look(ranks: list[RankProgress], now: float) -> None:
    for one in reversed(ranks):  # rank 0 sees what the others wrote
        one.watch_once(now)


def test_a_rank_that_hangs_is_told_of_once_and_shows_its_stack(
    ranks: list[RankProgress],
    told: list[str],
    dumps: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    for one in ranks:
        one.record_place("forward passes")
    look(ranks, 0.0)
    for one in ranks[:2]:
        one.record_place("the optimizer's step")
    look(ranks, 10.0)
    look(ranks, 59.0)
    assert (told, dumps) == ([], [])
    for now in (61.0, 75.0, 90.0, 600.0):
        look(ranks, now)
    assert told[-1].startswith("behind all others: rank 2 at forward passes for ")
    assert "ranks 0-1 at the optimizer's step for " in told[-1]
    assert len(told) == 2, "rank 2, then those that wait for it"
    assert len(dumps) == 3, "a stack in each rank's log"
    assert "the trainer stands still: behind all others: rank 2" in caplog.text


@pytest.mark.parametrize(
    "message",
    [
        "[unbound_buffer.cc:129] Timed out waiting 1800000ms for recv operation to complete",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 1800017",
    ],
)
def test_a_collective_that_is_late_says_who_hangs(
    message: str, ranks: list[RankProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in ranks:
        one.record_place("forward passes")
    ranks[0].record_place("the optimizer's step")
    look(ranks, 0.0)
    monkeypatch.setattr(rank_progress, "_active_progress", ranks[0])
    with pytest.raises(
        LostTrainerRankError, match=r"hangs: behind all others: ranks 1-2 at forward"
    ):
        raise_for_lost_rank(RuntimeError(message))


@pytest.mark.parametrize(
    "message",
    [
        "NCCL error: remote process exited or there was a network error, NCCL version 2.30.7",
        "ncclRemoteError: A call failed possibly due to a network error",
        "NCCL communicator was aborted on rank 1. Original reason for failure was: ...",
        "Connection closed by peer [127.0.0.1]:1234",
    ],
)
def test_words_of_a_lost_peer_are_known(message: str) -> None:
    with pytest.raises(LostTrainerRankError, match="another trainer rank disappeared"):
        raise_for_lost_rank(RuntimeError(message))
    raise_for_lost_rank(RuntimeError("CUDA error: an illegal memory access was encountered"))

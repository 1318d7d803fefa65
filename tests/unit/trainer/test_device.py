"""Ranks take their GPUs, Megatron imports no forbidden package, and a hanging rank is named."""

import faulthandler
import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import ClusterError, LostTrainerRankError
from areal_hpc.trainer import collectives
from areal_hpc.trainer.collectives import RankProgress, raise_for_lost_rank
from areal_hpc.trainer.private_apis.megatron_replacing_packages import (
    MEGATRON_REPLACEMENTS,
    refuse_megatron_replacements,
)
from areal_hpc.trainer.process_groups import _set_device


def show_gpus(monkeypatch: pytest.MonkeyPatch, visible: int) -> list[int]:
    """Stand for a machine with that many GPUs; return the list of devices that are set."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


@pytest.mark.parametrize(
    ("visible", "setting", "expected"),
    [
        (1, "auto", [0, 0, 0]),  # the only visible one belongs to any rank
        (1, "cuda", [0, 0, 0]),
        (8, "cuda", [0, 1, 2]),
    ],
)
def test_each_rank_takes_its_gpu(
    monkeypatch: pytest.MonkeyPatch, visible: int, setting: str, expected: list[int]
) -> None:
    taken = show_gpus(monkeypatch, visible)
    devices = [_set_device(setting, rank) for rank in range(3)]
    assert devices == [torch.device("cuda", index) for index in expected]
    assert taken == expected


def test_too_few_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = show_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ClusterError, match="--gpus-per-task=1") as refusal:
        _set_device("cuda", 3)
    message = str(refusal.value)
    assert "local rank 3 of the trainer needs a GPU of its own, and 2 are visible" in message
    assert "CUDA_VISIBLE_DEVICES='4,5'" in message
    assert "--gpu-bind" in message
    assert "at: cluster.slurm.srun" in message
    assert taken == []


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = show_gpus(monkeypatch, 0)
    assert _set_device("auto", 0) == torch.device("cpu")
    with pytest.raises(ClusterError, match="shows no GPU"):
        _set_device("cuda", 0)
    assert taken == []


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Folder with both packages, either of which fails when it is imported."""
    for name in MEGATRON_REPLACEMENTS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')\n")
    return tmp_path


def test_a_rank_refuses_them_and_imports_none(stubs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_megatron_replacements()
    monkeypatch.syspath_prepend(str(stubs))
    with pytest.raises(ClusterError) as caught:
        refuse_megatron_replacements()
    assert [problem.key for problem in caught.value.problems] == ["cluster.train.python"] * 2
    for name, problem in zip(MEGATRON_REPLACEMENTS, caught.value.problems, strict=True):
        assert name in problem.message
        assert problem.hint is not None
        assert "uninstall" in problem.hint
        assert name not in sys.modules


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    dumps: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback", lambda: dumps.append("stacks"))
    return dumps


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def ranks(lines: list[str]) -> list[RankProgress]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return [RankProgress(store, rank, 3, lines.append, hang_s=60) for rank in range(3)]


def look(ranks: list[RankProgress], now: float) -> None:
    for rank in reversed(ranks):  # rank 0 sees what the others wrote
        rank.watch_once(now)


def test_a_rank_that_hangs_is_told_of_once_and_shows_its_stack(
    ranks: list[RankProgress], lines: list[str], dumps: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for rank in ranks:
        rank.record_place("forward passes")
    look(ranks, 0.0)
    for rank in ranks[:2]:
        rank.record_place("the optimizer's step")
    look(ranks, 10.0)
    look(ranks, 59.0)
    assert (lines, dumps) == ([], [])
    for now in (61.0, 75.0, 90.0, 600.0):
        look(ranks, now)
    assert lines[-1].startswith("behind all others: rank 2 at forward passes for ")
    assert "ranks 0-1 at the optimizer's step for " in lines[-1]
    assert len(lines) == 2, "rank 2, then those that wait for it"
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
    for rank in ranks:
        rank.record_place("forward passes")
    ranks[0].record_place("the optimizer's step")
    look(ranks, 0.0)
    monkeypatch.setattr(collectives, "_active_progress", ranks[0])
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

"""Checkpoints are written beside the training, appear whole, and fail loudly."""

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import ClusterError, OtherRankError, ShardError, SupersededTrainerError
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.rundir.checkpoints import (
    COMPLETE_MARKER_FILE,
    TrainerState,
    find_latest_checkpoint,
    list_checkpoints,
    write_trainer_state,
)
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.checkpoints import writer
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.config import Schedule
from areal_hpc.trainer.job import make_replay_coordinator
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.loop import Coordinator, run_loop
from areal_hpc.trainer.loop.step_record import StepRecord
from areal_hpc.wire.ledger import BatchManifest
from tests.support.replay_worker import (
    Scenario,
    begin_training,
    config_of,
    make_learner,
    state_of,
    take_step,
)

on_one_rank = pytest.mark.on_ranks(1)


def visible(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that a restart would see."""
    return sorted(one.state.step for one in list_checkpoints(paths.checkpoints_dir))


def begin_held(learner: Learner) -> threading.Event:
    """Begin a checkpoint that is not written before the event is set."""
    released, write = threading.Event(), writer.write_rank_file

    def write_once_released(content: memoryview, path: Path) -> None:
        assert released.wait(60.0)
        write(content, path)

    pytest.MonkeyPatch().setattr(writer, "write_rank_file", write_once_released)
    learner.begin_checkpoint({})
    return released


def let_go_soon(released: threading.Event) -> None:
    threading.Timer(0.5, released.set).start()


@on_one_rank
def test_training_continues_during_a_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    learner = begin_training(scenario, paths)
    at_step_2 = state_of(learner)
    released = begin_held(learner)
    assert not any(learner.checkpoints.poll_save() for _ in range(3))
    take_step(learner, paths, 3)
    assert visible(paths) == [1]
    began = time.monotonic()
    let_go_soon(released)
    learner.begin_checkpoint({})
    assert time.monotonic() - began >= 0.4
    assert 2 in visible(paths)
    assert learner.checkpoints.finish_save()
    assert visible(paths) == [2, 3]
    shutil.rmtree(paths.checkpoints_dir / "step_00000003")
    assert state_of(make_learner(scenario, paths)) == at_step_2 != state_of(learner)


@on_one_rank
def test_the_checkpoint_with_the_best_evaluation_is_kept(
    scenario: Scenario, paths: RunPaths
) -> None:
    learner = begin_training(scenario, paths, keep_best="aime/pass@8")
    for step, value in ((1, 0.9), (2, 0.1)):
        append_line(paths.metrics, {"step": step, "evaluation/aime/pass@8": value})
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    take_step(learner, paths, 3)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    assert visible(paths) == [1, 2, 3]
    assert make_learner(scenario, paths).version.step == 3, "a run resumes from the last one"


@on_one_rank
def test_the_end_of_the_loop_waits_for_the_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    learner, stop = begin_training(scenario, paths), StopRequest()
    let_go_soon(begin_held(learner))
    coordinator = make_replay_coordinator(learner, paths, config_of(scenario), 1, 2, stop)
    assert run_loop(learner, coordinator, stop)
    assert visible(paths) == [1, 2]


def raise_unreachable(step: int) -> BatchManifest | None:
    raise ClusterError("the ledger stays away")


@pytest.mark.on_ranks(2)
def test_a_failure_waits_for_the_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    learner, stop, coordinator = begin_training(scenario, paths), StopRequest(), None
    expectation: AbstractContextManager[object] = nullcontext()
    let_go_soon(begin_held(learner))
    if dist.get_rank() == 0:
        record = StepRecord(MetricsWriter(paths.metrics, None, 2), learner.version, None)
        coordinator = Coordinator(Schedule(3, 1, None), record, raise_unreachable, stop)
        expectation = pytest.raises(ClusterError, match="the ledger stays away")
    with expectation:
        run_loop(learner, coordinator, stop)
    assert visible(paths) == [1, 2]


@contextmanager
def refusal(paths: RunPaths, kind: type[Exception], *said: str) -> Iterator[None]:
    """A checkpoint fails with an error that says why, and the earlier one stays."""
    with pytest.raises(kind) as caught:
        yield
    assert all(part in str(caught.value) for part in said), caught.value
    assert visible(paths) == [1]


def fill_disk(free_bytes: int) -> None:
    """Let this rank put no file above that size onto the disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, resource.RLIM_INFINITY))


@on_one_rank
def test_a_full_disk_fails_the_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    learner = begin_training(scenario, paths)
    fill_disk(100)
    with refusal(paths, ClusterError, "could not be written", "quota"):
        learner.begin_checkpoint({})


@pytest.mark.on_ranks(2)
def test_one_rank_that_cannot_write_fails_the_checkpoint(
    scenario: Scenario, paths: RunPaths
) -> None:
    learner = begin_training(scenario, paths)
    is_full = dist.get_rank() == 1
    if is_full:
        fill_disk(100_000)
    learner.begin_checkpoint({})
    said = ("could not be written", "rank_00001.bin", "quota") if is_full else ()
    with refusal(paths, ClusterError if is_full else OtherRankError, *said):
        learner.checkpoints.finish_save()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.on_ranks(2)
def test_a_damaged_checkpoint_is_named(scenario: Scenario, paths: RunPaths) -> None:
    begin_training(scenario, paths).checkpoints.close()
    file = paths.checkpoints_dir / "step_00000001" / "rank_00001.bin"
    content = file.read_bytes()
    is_faulty = dist.get_rank() == 1
    damages: list[Callable[[Path], None]] = [truncate, flip_a_bit, Path.unlink]
    for damage in damages:
        dist.barrier()
        if is_faulty:
            damage(file)
        dist.barrier()
        said = ("step_00000001/rank_00001.bin", "move") if is_faulty else ()
        with refusal(paths, ShardError if is_faulty else OtherRankError, *said):
            make_learner(scenario, paths)
        if is_faulty:
            file.write_bytes(content)
    dist.barrier()
    assert make_learner(scenario, paths).state.step == 1


@on_one_rank
def test_a_superseded_trainer_saves_nothing(scenario: Scenario, paths: RunPaths) -> None:
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    claim_next_number(paths.generations_dir)
    with refusal(paths, SupersededTrainerError):
        learner.checkpoints.finish_save()


def place_checkpoint(paths: RunPaths, generation: int) -> Path:
    """A file of a checkpoint of step 2, by another start of the trainer."""
    path = paths.checkpoints_dir / "step_00000002"
    path.mkdir()
    write_trainer_state(path, TrainerState(step=2, generation=generation, seed=1))
    for name in ("data", COMPLETE_MARKER_FILE):
        (path / name).touch()
    return path / "data"


@on_one_rank
def test_a_superseded_trainer_spares_newer_checkpoints(scenario: Scenario, paths: RunPaths) -> None:
    learner = begin_training(scenario, paths)
    data = place_checkpoint(paths, generation=9)
    learner.begin_checkpoint({})
    with pytest.raises(SupersededTrainerError):
        learner.checkpoints.finish_save()
    latest = find_latest_checkpoint(paths.checkpoints_dir)
    assert latest is not None
    assert latest.state.generation == 9
    assert data.exists()


@on_one_rank
def test_an_abandoned_checkpoint_is_replaced(scenario: Scenario, paths: RunPaths) -> None:
    learner = begin_training(scenario, paths)
    data = place_checkpoint(paths, generation=0)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    assert not data.exists()
    assert visible(paths) == [1, 2]


def test_cleaning_spares_what_a_later_generation_is_writing(tmp_path: Path) -> None:
    for name in ("2.generation_3", "2.generation_4", "2.generation_5", "1.old", "1.replaced"):
        (tmp_path / f".step_0000000{name}").mkdir()
    CheckpointStore(tmp_path, keep=2).delete_leftovers(generation=4)
    assert [path.name for path in tmp_path.iterdir()] == [".step_00000002.generation_5"]

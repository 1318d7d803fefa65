"""Checkpoints appear complete and fail loudly; a rank resumes all but settings from its part."""

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import areal_hpc.trainer.model.cpu.megatron_cpu  # noqa: F401  (before anything of Megatron)
from areal_hpc.errors import (
    AgentError,
    ClusterError,
    OtherRankError,
    ShardError,
    SupersededTrainerError,
)
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.metrics.writer import MetricsWriter, StepRecord
from areal_hpc.rundir.checkpoints import (
    COMPLETE_MARKER_FILE,
    TrainerState,
    find_latest_checkpoint,
    get_rank_file_path,
    list_checkpoints,
    read_checkpoint_index,
    write_trainer_state,
)
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import collectives
from areal_hpc.trainer.checkpoints import store
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.collectives import is_true_on_any_rank
from areal_hpc.trainer.config import Schedule
from areal_hpc.trainer.job import make_replay_coordinator
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop import Coordinator, run_loop
from areal_hpc.trainer.private_apis.megatron_private import list_optimizer_shards
from areal_hpc.wire.ledger import BatchManifest
from tests.support.counted_reads import counted_reads
from tests.support.rank_server import RankServer
from tests.support.replay_worker import (
    Scenario,
    begin_training,
    config_of,
    make_learner,
    moments_of,
    state_of,
    take_step,
)

on_one_rank = pytest.mark.on_ranks(1)


def visible(paths: RunPaths) -> list[int]:
    return sorted(checkpoint.state.step for checkpoint in list_checkpoints(paths.checkpoints_dir))


def begin_held(learner: Learner) -> threading.Event:
    released, write = threading.Event(), store.write_rank_file

    def write_once_released(content: memoryview, path: Path) -> None:
        assert released.wait(60.0)
        write(content, path)

    pytest.MonkeyPatch().setattr(store, "write_rank_file", write_once_released)
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
def refusal(paths: RunPaths, kind: type[Exception], *parts: str) -> Iterator[None]:
    """Expect an error of a checkpoint with these parts, and the earlier checkpoint alone."""
    with pytest.raises(kind) as caught:
        yield
    assert all(part in str(caught.value) for part in parts), caught.value
    assert visible(paths) == [1]


def fill_disk(free_bytes: int) -> None:
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
    parts = ("could not be written", "rank_00001.bin", "quota") if is_full else ()
    with refusal(paths, ClusterError if is_full else OtherRankError, *parts):
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
        parts = ("step_00000001/rank_00001.bin", "move") if is_faulty else ()
        with refusal(paths, ShardError if is_faulty else OtherRankError, *parts):
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
    """Place a file of a checkpoint of step 2, by another start of the trainer."""
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


FLOAT32, BFLOAT16 = {"dtype": "float32"}, {"dtype": "bfloat16"}
BYTES_PER_PARAMETER = 14


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize("scenario", [BFLOAT16], indirect=True)
def test_each_of_four_ranks_holds_writes_and_reads_a_quarter(
    scenario: Scenario, paths: RunPaths
) -> None:
    learner = begin_training(scenario, paths)
    checkpoint = paths.checkpoints_dir / "step_00000001"
    writer = learner.checkpoints._writer
    assert writer is not None
    total = BYTES_PER_PARAMETER * sum(weight.numel() for weight in learner.policy.gpt.parameters())
    held_bytes = len(writer.reserve_memory(0, torch.device("cpu")))
    written = get_rank_file_path(checkpoint, dist.get_rank()).stat().st_size
    with counted_reads() as reads:
        make_learner(scenario, paths)
    for size in (held_bytes, written, sum(reads)):
        assert size == pytest.approx(total / 4, rel=0.1)
    assert sum(reads) == written
    index = read_checkpoint_index(checkpoint)
    assert sum(index.compute_data_bytes(rank) for rank in range(4)) == total
    files = [path.name for path in checkpoint.iterdir() if path.suffix == ".bin"]
    assert sorted(files) == [f"rank_0000{rank}.bin" for rank in range(4)]


def masters_of(learner: Learner) -> list[torch.Tensor]:
    return [shard.master.clone() for shard in list_optimizer_shards(learner._optimizer)]


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("scenario", [FLOAT32, BFLOAT16], indirect=True, ids=str)
def test_a_run_goes_on_with_weights_of_another_type(scenario: Scenario, paths: RunPaths) -> None:
    """Master weights and moments stay; float32 weights are their own master weights."""
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    learner.checkpoints.close()
    scenario["trainer"] |= FLOAT32 if scenario["trainer"]["dtype"] == "bfloat16" else BFLOAT16
    resumed = make_learner(scenario, paths)
    for expected, actual in zip(masters_of(learner), masters_of(resumed), strict=True):
        assert torch.equal(expected, actual)
    for old, new in zip(
        list_optimizer_shards(learner._optimizer),
        list_optimizer_shards(resumed._optimizer),
        strict=True,
    ):
        assert all(torch.equal(old.moments[name], new.moments[name]) for name in old.moments)
    exact = dict(learner.policy.gpt.named_parameters())
    for name, parameter in resumed.policy.gpt.named_parameters():
        assert parameter.dtype == resumed.policy.dtype
        assert torch.allclose(parameter.float(), exact[name].float(), rtol=1e-2, atol=1e-6)


@pytest.mark.on_ranks(2)
def test_a_checkpoint_is_the_same_whoever_resumed_it(scenario: Scenario, paths: RunPaths) -> None:
    """Every rank's file has the same bytes when it is saved, resumed and saved again."""
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    file = get_rank_file_path(paths.checkpoints_dir / "step_00000002", dist.get_rank())
    before = file.read_bytes()
    learner.checkpoints.close()
    dist.barrier()
    resumed = make_learner(scenario, paths)
    assert state_of(resumed) == state_of(learner)
    resumed.begin_checkpoint({})
    resumed.checkpoints.finish_save()
    assert file.read_bytes() == before


STOPPED, STORAGE_FAILED, DATA_DAMAGED, AGENTS_FAILED = 143, 75, 65, 70
TWO_RANKS = {"total_steps": 1, "parallel": {"dp": 2}}


@pytest.mark.on_ranks(1)
def test_the_step_after_a_resume_needs_all_that_was_kept(
    scenario: Scenario, paths: RunPaths
) -> None:
    learner = begin_training(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish_save()
    take_step(learner, paths, 3)
    expected = state_of(learner)

    def is_exact_without(name: str | None) -> bool:
        """Test if the third step is exact after a resume that loses a value of each parameter."""
        resumed = make_learner(scenario, paths)
        # Every parameter needs a counter of its own: AdamW counts it up in place.
        assert len({id(moments["step"]) for moments in moments_of(resumed)}) > 10
        for moments in moments_of(resumed):
            if name is not None:
                moments[name].zero_()
        take_step(resumed, paths, 3)
        return state_of(resumed) == expected

    assert is_exact_without(None)
    for name in ("step", "exp_avg", "exp_avg_sq"):
        assert not is_exact_without(name)


def settings_of(learner: Learner) -> list[dict[str, Any]]:
    """Return AdamW's settings of every group of parameters."""
    optimizer: Any = learner._optimizer
    return [
        {name: group[name] for name in ("betas", "eps", "weight_decay", "wd_mult")}
        for part in optimizer.chained_optimizers
        for group in part.optimizer.param_groups
    ]


@pytest.mark.on_ranks(1)
def test_a_resume_takes_the_recipes_optimizer_settings(scenario: Scenario, paths: RunPaths) -> None:
    begin_training(scenario, paths)
    new = {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}
    scenario["trainer"]["optimizer"] = new
    resumed = make_learner(scenario, paths)
    assert {float(moments["step"]) for moments in moments_of(resumed)} == {1.0}
    for group in settings_of(resumed):
        assert (list(group["betas"]), group["eps"]) == ([0.8, 0.9], 1e-6)
        assert group["weight_decay"] == pytest.approx(0.3 * group["wd_mult"])


@pytest.mark.on_ranks(2)
def test_all_ranks_resume_from_what_rank_0_chose(scenario: Scenario, paths: RunPaths) -> None:
    begin_training(scenario, paths).checkpoints.close()
    dist.barrier()
    if dist.get_rank() == 1:
        mock.patch.object(store, "find_latest_checkpoint", None).start()
    assert make_learner(scenario, paths).state.step == 1


def look_for_a_checkpoint(scenario: Scenario, paths: RunPaths) -> None:
    """Make rank 1 look elsewhere."""
    begin_training(scenario, paths).checkpoints.close()
    collectives.FILE_VISIBLE_TIMEOUT_S = 0.5
    is_blind = dist.get_rank() == 1
    directory = paths.root / "elsewhere" if is_blind else paths.checkpoints_dir
    CheckpointStore(directory, keep=2).broadcast_latest_checkpoint()


def test_a_rank_without_the_checkpoint_says_so(ranks: RankServer, paths: RunPaths) -> None:
    outcome = ranks.call(look_for_a_checkpoint, paths, 2, trainer=TWO_RANKS)
    assert outcome.codes == [STOPPED, STORAGE_FAILED]
    assert "this rank cannot see" in outcome.reports[1]["error"]


def fail_alone(scenario: Scenario, paths: RunPaths) -> None:
    """Fail while the other ranks wait in a collective, and none is still joining the groups."""
    is_true_on_any_rank(False)
    if dist.get_rank() == scenario["failing"]:
        raise AgentError("agents do nothing but fail")
    is_true_on_any_rank(False)


@pytest.mark.parametrize("failing", [0, 1])
def test_only_the_failed_rank_reports(ranks: RankServer, paths: RunPaths, failing: int) -> None:
    outcome = ranks.call(fail_alone, paths, 2, trainer=TWO_RANKS, failing=failing)
    assert outcome.codes[failing] == AGENTS_FAILED
    assert outcome.codes[1 - failing] == STOPPED, outcome.log
    assert outcome.reports[1 - failing] == {}

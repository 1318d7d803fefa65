"""What ranks do to themselves for `test_commits` and `test_adamw_faults`, each in its process."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_hpc.errors import AgentError, ArealError, ClusterError
from areal_hpc.jobs.signals import StopRequest
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.trainer import AdamConfig
from areal_hpc.rundir.checkpoints import MARKER_FILE, STATE_FILE, TrainerState, find_latest
from areal_hpc.rundir.generations import claim_next_number
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer import collectives, megatron_private
from areal_hpc.trainer.checkpoints import megatron_format
from areal_hpc.trainer.checkpoints import store as checkpoint
from areal_hpc.trainer.checkpoints.store import CheckpointStore
from areal_hpc.trainer.checkpoints.writer_client import WriterClient
from areal_hpc.trainer.collectives import any_true
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.loop import BatchSource, Coordinator, run_loop
from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.trainer.loop.step_record import StepRecord
from areal_hpc.trainer.optimizer import apply_optimizer_settings
from areal_hpc.trainer.replay_job import make_replay_coordinator
from areal_hpc.trainer.step import LossStats
from areal_hpc.wire.fault_points import FAULTS_VARIABLE
from areal_hpc.wire.ledger import BatchManifest
from tests.support.replay_worker import Scenario, config_of, digests, make_learner

Found = dict[str, Any]


def begin(scenario: Scenario, paths: RunPaths) -> Learner:
    """A learner with one step taken and saved, and a second step taken."""
    learner = make_learner(scenario, paths)
    step(learner, paths, 1)
    learner.begin_checkpoint({})
    learner.checkpoints.finish()
    step(learner, paths, 2)
    return learner


def step(learner: Learner, paths: RunPaths, number: int) -> None:
    learner.train(read_manifest(paths, number))


def state_of(learner: Learner) -> dict[str, str]:
    return digests(learner.policy, learner._optimizer)


def names(paths: RunPaths) -> list[str]:
    return sorted(
        p.name for p in paths.checkpoints_dir.glob("step_*") if (p / MARKER_FILE).exists()
    )


def writer_of(learner: Learner) -> WriterClient:
    assert learner.checkpoints._writer is not None
    return learner.checkpoints._writer


def begin_held(learner: Learner) -> int:
    """Begin a checkpoint that a stopped writer holds up; its process id."""
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_checkpoint({})
    return writer


def failure(act: Callable[[], object]) -> Found:
    """What it fails with."""
    try:
        act()
    except ArealError as error:
        return {"kind": type(error).__name__, "error": str(error)}
    return {"kind": None}


def training_goes_on(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    at_step_2 = state_of(learner)
    writer = begin_held(learner)
    polled = [learner.checkpoints.poll() for _ in range(3)]
    step(learner, paths, 3)
    visible_before = names(paths)
    os.kill(writer, signal.SIGCONT)
    became_durable = learner.checkpoints.finish()
    resumed = make_learner(scenario, paths)
    return {
        "polled": polled,
        "visible_before": visible_before,
        "became_durable": became_durable,
        "visible_after": names(paths),
        "holds_step_2": state_of(resumed) == at_step_2 != state_of(learner),
    }


def second_checkpoint_waits(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    writer = begin_held(learner)
    step(learner, paths, 3)
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    learner.begin_checkpoint({})
    waited_s = time.monotonic() - began
    visible = "step_00000002" in names(paths)
    learner.checkpoints.finish()
    return {"waited_s": waited_s, "first_was_visible": visible, "visible": names(paths)}


def stop_waits(scenario: Scenario, paths: RunPaths) -> Found:
    """The loop is told to stop while a checkpoint is in the writing."""
    learner = begin(scenario, paths)
    writer = begin_held(learner)
    stop = StopRequest()
    coordinator = make_replay_coordinator(learner, paths, config_of(scenario), 1, 2, stop)
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    finished = run_loop(learner, coordinator, stop)
    return {"finished": finished, "visible": names(paths)}


class UnreachableSource(BatchSource):
    """A source that no batch comes from."""

    def next_batch(self, step: int) -> BatchManifest | None:
        raise ClusterError("the ledger stays away")


def failure_waits(scenario: Scenario, paths: RunPaths) -> Found:
    """Rank 0 cannot go on while a checkpoint is in the writing."""
    learner = begin(scenario, paths)
    writer = begin_held(learner)
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    coordinator, stop = None, StopRequest()
    if dist.get_rank() == 0:
        record = StepRecord(MetricsWriter(paths.metrics, None, 2), learner.version, None)
        schedule = Schedule(3, 1, None, 0, 0)
        coordinator = Coordinator(schedule, record, UnreachableSource(), stop)
    try:
        run_loop(learner, coordinator, stop)
    except ClusterError as error:
        return {"error": str(error), "visible": names(paths)}
    return {"visible": names(paths)}


def disk_is_full(scenario: Scenario, paths: RunPaths) -> Found:
    """Files of this process end at 20 kB."""
    learner = begin(scenario, paths)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    return failure(lambda: learner.begin_checkpoint({})) | {"visible": names(paths)}


def checkpoint_is_damaged(scenario: Scenario, paths: RunPaths) -> Found:
    """A data file of the latest checkpoint was cut short."""
    begin(scenario, paths).checkpoints.close()
    latest = find_latest(paths.checkpoints_dir)
    assert latest is not None
    for path in latest.path.glob("*.distcp"):
        os.truncate(path, path.stat().st_size // 2)
    return failure(lambda: make_learner(scenario, paths)) | {"visible": names(paths)}


def writer_dies_once(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    at_step_2 = state_of(learner)
    writer = begin_held(learner)
    os.kill(writer, signal.SIGKILL)
    learner.checkpoints.finish()
    return {
        "visible": names(paths),
        "is_replaced": writer_of(learner)._process.pid != writer,
        "holds_step_2": state_of(make_learner(scenario, paths)) == at_step_2,
    }


def writers_keep_dying(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    writer = begin_held(learner)
    os.environ[FAULTS_VARIABLE] = "checkpoint.before_write=kill"  # for the one that takes its place
    os.kill(writer, signal.SIGKILL)
    return failure(learner.checkpoints.finish) | {"visible": names(paths)}


def storage_refuses(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    writer = begin_held(learner)
    for partial in paths.checkpoints_dir.glob(".step_*"):
        shutil.rmtree(partial)
    os.kill(writer, signal.SIGCONT)
    return failure(learner.checkpoints.finish) | {"visible": names(paths)}


def replaced_while_writing(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    learner.begin_checkpoint({})
    claim_next_number(paths.generations_dir)
    return failure(learner.checkpoints.finish) | {"visible": names(paths)}


def place_checkpoint(paths: RunPaths, generation: int) -> Path:
    """A checkpoint of step 2 by another start of the trainer."""
    path = paths.checkpoints_dir / "step_00000002"
    path.mkdir()
    state = TrainerState(step=2, generation=generation, seed=1)
    (path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    (path / "data").touch()
    (path / MARKER_FILE).touch()
    return path


def successor_saved_first(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    place_checkpoint(paths, generation=9)
    learner.begin_checkpoint({})
    found = failure(learner.checkpoints.finish)
    latest = find_latest(paths.checkpoints_dir)
    assert latest is not None
    return found | {
        "generation": latest.state.generation,
        "is_whole": (latest.path / "data").exists(),
    }


def abandoned_checkpoint_is_replaced(scenario: Scenario, paths: RunPaths) -> Found:
    learner = begin(scenario, paths)
    path = place_checkpoint(paths, generation=0)
    learner.begin_checkpoint({})
    learner.checkpoints.finish()
    return {"is_replaced": not (path / "data").exists(), "visible": names(paths)}


def cleaned(scenario: Scenario, paths: RunPaths) -> Found:
    """Generation 4 cleans up."""
    left = ("2.generation_3", "2.generation_4", "2.generation_5", "1.old", "1.replaced")
    for name in left:
        (paths.checkpoints_dir / f".step_0000000{name}").mkdir(parents=True)
    CheckpointStore(paths.checkpoints_dir, keep=2).clean(generation=4)
    return {"left": [path.name for path in paths.checkpoints_dir.iterdir()]}


def draws_no_random_numbers(scenario: Scenario, paths: RunPaths) -> Found:
    def states() -> list[str]:
        numpy_state = np.random.get_state()
        return [str(torch.get_rng_state().tolist()), str(numpy_state), str(random.getstate())]

    before = states()
    begin(scenario, paths)
    return {"unchanged": states() == before}


def odd_maxima(scenario: Scenario, paths: RunPaths) -> Found:
    rank = dist.get_rank()
    own = {"odd": [5.0, float("nan")][rank], "huge": [float("inf"), 1.0][rank], "plain": rank + 1.0}
    maxima = LossStats({}, own).reduce_over_ranks((), tuple(own)).maxima
    return {name: str(value) for name, value in maxima.items()}


def settings_of(learner: Learner) -> Found:
    groups = [
        {name: group[name] for name in ("betas", "eps", "weight_decay", "wd_mult")}
        for part in learner._optimizer.chained_optimizers
        for group in part.optimizer.param_groups
    ]
    steps = {
        float(moments["step"])
        for part in learner._optimizer.chained_optimizers
        for moments in part.optimizer.state.values()
    }
    return {"groups": groups, "steps": sorted(steps)}


def other_settings(scenario: Scenario, paths: RunPaths) -> Found:
    """Resume with new AdamW settings, and once more without giving them to the optimizer."""
    begin(scenario, paths)
    new = {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}
    changed = {**scenario, "trainer": {"optimizer": new}}
    resumed = settings_of(make_learner(changed, paths))
    with mock.patch.object(checkpoint, "apply_optimizer_settings"):
        without = make_learner(changed, paths)
    forgotten = settings_of(without)
    apply_optimizer_settings(without._optimizer, AdamConfig.model_validate(new))
    return {"resumed": resumed, "forgotten": forgotten, "given": settings_of(without)}


def only_rank_0_chooses(scenario: Scenario, paths: RunPaths) -> Found:
    begin(scenario, paths).checkpoints.close()
    dist.barrier()
    if dist.get_rank() == 1:
        mock.patch("areal_hpc.trainer.checkpoints.store.find_latest", None).start()
    return {"step": make_learner(scenario, paths).state.step}


def chosen_checkpoint_is_not_there(scenario: Scenario, paths: RunPaths) -> Found:
    begin(scenario, paths).checkpoints.close()
    collectives.VISIBLE_TIMEOUT_S = 0.5
    is_blind = dist.get_rank() == 1
    directory = paths.root / "elsewhere" if is_blind else paths.checkpoints_dir
    CheckpointStore(directory, keep=2).find_latest_on_all_ranks()
    return {}


def rank_1_cannot_read(scenario: Scenario, paths: RunPaths) -> Found:
    collectives.VISIBLE_TIMEOUT_S = 0.5
    step(make_learner(scenario, paths), paths, 1)
    return {}


def one_rank_fails_alone(scenario: Scenario, paths: RunPaths) -> Found:
    """The others wait for it in a collective."""
    if dist.get_rank() == scenario["failing"]:
        raise AgentError("agents do nothing but fail")
    any_true(False)
    return {}


def adamw_fault(scenario: Scenario, paths: RunPaths) -> Found:
    """The step after a resume, with one of the mends taken out."""
    learner = begin(scenario, paths)
    learner.begin_checkpoint({})
    learner.checkpoints.finish()
    step(learner, paths, 3)

    load_sharded = megatron_format.load_sharded

    def load_unprimed(policy: Any, optimizer: Any, directory: Path) -> None:
        for part in optimizer.chained_optimizers:
            part.optimizer.state.clear()
        load_sharded(policy, optimizer, directory)

    mends: dict[str, AbstractContextManager[object]] = {
        "none": nullcontext(),
        "primed moments": mock.patch.object(megatron_format, "load_sharded", load_unprimed),
        "step count": mock.patch.object(megatron_private, "_keeping_step", lambda part, load: load),
        "step tensors": mock.patch.object(megatron_private, "_unshare_steps"),
    }
    with mends[scenario["without"]]:
        try:
            resumed = make_learner(scenario, paths)
        except (AssertionError, KeyError) as error:
            return {"raised": type(error).__name__}
    tensors = {
        id(moments["step"])
        for part in resumed._optimizer.chained_optimizers
        for moments in part.optimizer.state.values()
    }
    step(resumed, paths, 3)
    return {"step_tensors": len(tensors), "is_exact": state_of(resumed) == state_of(learner)}

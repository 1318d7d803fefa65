"""What ranks do to themselves for `test_commits` and `test_adamw_faults`, each in its process."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_hpc.cluster.epochs import take_next_epoch
from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.errors import AgentError, ArealError, ClusterError
from areal_hpc.faults import VARIABLE
from areal_hpc.layout import RunLayout
from areal_hpc.ledger.manifests import read_manifest
from areal_hpc.trainer.batch import experience
from areal_hpc.trainer.commits import sharded
from areal_hpc.trainer.commits import store as checkpoint
from areal_hpc.trainer.commits.store import MARKER, STATE_FILE, CommitStore, TrainerState
from areal_hpc.trainer.commits.writer_peer import WriterPeer
from areal_hpc.trainer.config import OptimizerConfig
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop import run_loop
from areal_hpc.trainer.optimizer import apply_settings
from areal_hpc.trainer.ranks import any_rank
from areal_hpc.trainer.replay import Replay
from areal_hpc.trainer.step import Tally
from tests.support.replay_worker import Scenario, config_of, digests, make_learner

Found = dict[str, Any]


def begin(scenario: Scenario, layout: RunLayout) -> Learner:
    """A learner with one step taken and committed, and a second step taken."""
    learner = make_learner(scenario, layout)
    step(learner, layout, 1)
    learner.begin_commit({})
    learner.finish_commit()
    step(learner, layout, 2)
    return learner


def step(learner: Learner, layout: RunLayout, number: int) -> None:
    learner.train(read_manifest(layout, number))


def state_of(learner: Learner) -> dict[str, str]:
    return digests(learner.policy, learner._optimizer)


def names(layout: RunLayout) -> list[str]:
    return sorted(p.name for p in layout.checkpoints_dir.glob("step_*") if (p / MARKER).exists())


def writer_of(learner: Learner) -> WriterPeer:
    assert learner._commits._writer is not None
    return learner._commits._writer


def failure(learner: Learner) -> Found:
    """What the commit in the writing fails with."""
    try:
        learner.finish_commit()
    except ArealError as error:
        return {"kind": type(error).__name__, "error": str(error)}
    return {"kind": None}


def training_goes_on(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    at_step_2 = state_of(learner)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    polled = [learner.poll_commit() for _ in range(3)]
    step(learner, layout, 3)
    visible_before = names(layout)
    os.kill(writer, signal.SIGCONT)
    became_durable = learner.finish_commit()
    resumed = make_learner(scenario, layout)
    return {
        "polled": polled,
        "visible_before": visible_before,
        "became_durable": became_durable,
        "visible_after": names(layout),
        "holds_step_2": state_of(resumed) == at_step_2 != state_of(learner),
    }


def second_commit_waits(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    step(learner, layout, 3)
    began = time.monotonic()
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    learner.begin_commit({})
    waited_s = time.monotonic() - began
    visible = "step_00000002" in names(layout)
    learner.finish_commit()
    return {"waited_s": waited_s, "first_was_visible": visible, "visible": names(layout)}


def stop_waits(scenario: Scenario, layout: RunLayout) -> Found:
    """The loop is told to stop while a commit is in the writing."""
    learner = begin(scenario, layout)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    stop = StopRequest()
    replay = Replay(learner, layout, config_of(scenario), 1, 2, stop)
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    finished = run_loop(learner, replay, stop)
    return {"finished": finished, "visible": names(layout)}


class Helpless:
    """A conductor that cannot go on."""

    def next(self) -> Any:
        raise ClusterError("the ledger stays away")

    def committed(self, seconds: float) -> None:
        """The commit under way is durable."""


def failure_waits(scenario: Scenario, layout: RunLayout) -> Found:
    """The conductor fails while a commit is in the writing."""
    learner = begin(scenario, layout)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    threading.Timer(0.5, os.kill, (writer, signal.SIGCONT)).start()
    conductor = Helpless() if dist.get_rank() == 0 else None
    try:
        run_loop(learner, conductor, StopRequest())  # type: ignore[arg-type]
    except ClusterError as error:
        return {"error": str(error), "visible": names(layout)}
    return {"visible": names(layout)}


def disk_is_full(scenario: Scenario, layout: RunLayout) -> Found:
    """Files of this process end at 20 kB."""
    learner = begin(scenario, layout)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        learner.begin_commit({})
    except ArealError as error:
        return {"error": str(error), "kind": type(error).__name__, "visible": names(layout)}
    return {}


def commit_is_damaged(scenario: Scenario, layout: RunLayout) -> Found:
    """A data file of the latest commit was cut short."""
    begin(scenario, layout).close()
    latest = CommitStore(layout.checkpoints_dir, keep=2).latest()
    assert latest is not None
    for path in latest.path.glob("*.distcp"):
        os.truncate(path, path.stat().st_size // 2)
    try:
        make_learner(scenario, layout)
    except ArealError as error:
        return {"error": str(error), "kind": type(error).__name__}
    return {}


def writer_dies_once(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    at_step_2 = state_of(learner)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    os.kill(writer, signal.SIGKILL)
    learner.finish_commit()
    return {
        "visible": names(layout),
        "is_replaced": writer_of(learner)._process.pid != writer,
        "holds_step_2": state_of(make_learner(scenario, layout)) == at_step_2,
    }


def writers_keep_dying(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    os.environ[VARIABLE] = "checkpoint.before_write=kill"  # for the one that takes its place
    os.kill(writer, signal.SIGKILL)
    return failure(learner) | {"visible": names(layout)}


def storage_refuses(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    writer = writer_of(learner)._process.pid
    os.kill(writer, signal.SIGSTOP)
    learner.begin_commit({})
    for partial in layout.checkpoints_dir.glob(".step_*"):
        shutil.rmtree(partial)
    os.kill(writer, signal.SIGCONT)
    return failure(learner) | {"visible": names(layout)}


def replaced_while_writing(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    learner.begin_commit({})
    take_next_epoch(layout.epochs_dir)
    return failure(learner) | {"visible": names(layout)}


def place_commit(layout: RunLayout, epoch: int) -> Path:
    """A commit of step 2 by another start of the trainer."""
    path = layout.checkpoints_dir / "step_00000002"
    path.mkdir()
    state = TrainerState(step=2, epoch=epoch, seed=1)
    (path / STATE_FILE).write_bytes(msgspec.json.encode(state))
    (path / "data").touch()
    (path / MARKER).touch()
    return path


def successor_committed_first(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    place_commit(layout, epoch=9)
    learner.begin_commit({})
    found = failure(learner)
    latest = CommitStore(layout.checkpoints_dir, keep=2).latest()
    assert latest is not None
    return found | {"epoch": latest.state.epoch, "is_whole": (latest.path / "data").exists()}


def abandoned_commit_is_replaced(scenario: Scenario, layout: RunLayout) -> Found:
    learner = begin(scenario, layout)
    path = place_commit(layout, epoch=0)
    learner.begin_commit({})
    learner.finish_commit()
    return {"is_replaced": not (path / "data").exists(), "visible": names(layout)}


def cleaned(scenario: Scenario, layout: RunLayout) -> Found:
    """Epoch 4 cleans up."""
    left = ("2.epoch_3", "2.epoch_4", "2.epoch_5", "1.old", "1.replaced")
    for name in left:
        (layout.checkpoints_dir / f".step_0000000{name}").mkdir(parents=True)
    CommitStore(layout.checkpoints_dir, keep=2).clean(epoch=4)
    return {"left": [path.name for path in layout.checkpoints_dir.iterdir()]}


def draws_no_random_numbers(scenario: Scenario, layout: RunLayout) -> Found:
    def states() -> list[str]:
        numpy_state = np.random.get_state()
        return [str(torch.get_rng_state().tolist()), str(numpy_state), str(random.getstate())]

    before = states()
    begin(scenario, layout)
    return {"unchanged": states() == before}


def odd_maxima(scenario: Scenario, layout: RunLayout) -> Found:
    rank = dist.get_rank()
    own = {"odd": [5.0, float("nan")][rank], "huge": [float("inf"), 1.0][rank], "plain": rank + 1.0}
    maxima = Tally({}, own).over_all_ranks((), tuple(own)).maxima
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


def other_settings(scenario: Scenario, layout: RunLayout) -> Found:
    """Resume with new AdamW settings, and once more without giving them to the optimizer."""
    begin(scenario, layout)
    new = {"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.3}
    changed = {**scenario, "trainer": {"optimizer": new}}
    resumed = settings_of(make_learner(changed, layout))
    with mock.patch("areal_hpc.trainer.learner.apply_settings"):
        without = make_learner(changed, layout)
    forgotten = settings_of(without)
    apply_settings(without._optimizer, OptimizerConfig.model_validate(new))
    return {"resumed": resumed, "forgotten": forgotten, "given": settings_of(without)}


def only_rank_0_chooses(scenario: Scenario, layout: RunLayout) -> Found:
    begin(scenario, layout).close()
    dist.barrier()
    if dist.get_rank() == 1:
        CommitStore.latest = None  # type: ignore[assignment,method-assign]
    return {"step": make_learner(scenario, layout).state.step}


def chosen_commit_is_not_there(scenario: Scenario, layout: RunLayout) -> Found:
    begin(scenario, layout).close()
    checkpoint.VISIBLE_TIMEOUT_S = 0.5
    is_blind = dist.get_rank() == 1
    directory = layout.root / "elsewhere" if is_blind else layout.checkpoints_dir
    CommitStore(directory, keep=2).agree_on_latest()
    return {}


def rank_1_cannot_read(scenario: Scenario, layout: RunLayout) -> Found:
    experience.SHARD_PATIENCE_S = 0.5
    step(make_learner(scenario, layout), layout, 1)
    return {}


def one_rank_fails_alone(scenario: Scenario, layout: RunLayout) -> Found:
    """The others wait for it in a collective."""
    if dist.get_rank() == scenario["failing"]:
        raise AgentError("agents do nothing but fail")
    any_rank(False)
    return {}


def adamw_fault(scenario: Scenario, layout: RunLayout) -> Found:
    """The step after a resume, with one of the mends taken out."""
    learner = begin(scenario, layout)
    learner.begin_commit({})
    learner.finish_commit()
    step(learner, layout, 3)

    def load_unprimed(policy: Any, optimizer: Any, commit: Any) -> None:
        for part in optimizer.chained_optimizers:
            part.optimizer.state.clear()
        sharded.load(policy, optimizer, commit.path)

    mends: dict[str, AbstractContextManager[object]] = {
        "none": nullcontext(),
        "primed moments": mock.patch("areal_hpc.trainer.learner.load_commit", load_unprimed),
        "step count": mock.patch.object(sharded, "_keeping_step", lambda part, load: load),
        "step tensors": mock.patch.object(sharded, "_unshare_steps"),
    }
    with mends[scenario["without"]]:
        try:
            resumed = make_learner(scenario, layout)
        except (AssertionError, KeyError) as error:
            return {"raised": type(error).__name__}
    tensors = {
        id(moments["step"])
        for part in resumed._optimizer.chained_optimizers
        for moments in part.optimizer.state.values()
    }
    step(resumed, layout, 3)
    return {"step_tensors": len(tensors), "is_exact": state_of(resumed) == state_of(learner)}

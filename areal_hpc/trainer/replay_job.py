"""Recorded batches trained on again: `areal_hpc.trainer.replay_job:run`, once per rank."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.cluster.preemption import StopRequest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.job_config import ReplayJobConfig
from areal_hpc.trainer.learner import make_learner
from areal_hpc.trainer.loop import run_loop
from areal_hpc.trainer.rank import run_rank
from areal_hpc.trainer.replay import Replay
from areal_hpc.wire.weight_version import GenerationFork


def run(config: dict[str, Any]) -> None:
    """Train the steps asked for, from the newest commit in the directory or the starting model.

    Raises:
        SystemExit: Stopped by a signal before the end, the work so far being committed; or another
            rank failed.
    """
    job = ReplayJobConfig.model_validate(config)
    layout = RunPaths(job.run_dir)
    stop = StopRequest.install()
    run_rank(
        job.trainer.parallel,
        job.trainer.device,
        layout.rendezvous_dir,
        stop,
        lambda device: _train(job, layout, device, stop),
    )


def _train(job: ReplayJobConfig, layout: RunPaths, device: torch.device, stop: StopRequest) -> bool:
    forks = [GenerationFork(epoch, step) for epoch, step in job.forks]
    learner = make_learner(
        job.trainer, layout, job.model_path, device, epoch=forks[-1].epoch, seed=job.seed
    )
    # Tokens are as old as they were: this is no new start of the recorded run.
    learner.state = msgspec.structs.replace(learner.state, forks=forks)
    replay = None
    if dist.get_rank() == 0:
        learner.clean()
        replay = Replay(learner, layout, job.trainer, job.first_step, job.last_step, stop)
    finished = run_loop(learner, replay, stop)
    learner.close()
    return finished

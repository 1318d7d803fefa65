"""Recorded batches trained on again: `areal_hpc.trainer.replay_job:run`, once per rank."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.jobs.signals import StopRequest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.config import ReplayJobConfig
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.loop import run_loop
from areal_hpc.trainer.loop.replay_source import make_replay_coordinator
from areal_hpc.trainer.rank_main import run_rank
from areal_hpc.wire.weight_version import GenerationFork


def run(config: dict[str, Any]) -> None:
    """Train the steps asked for, from the newest checkpoint in the directory or the starting model.

    Raises:
        SystemExit: Stopped by a signal before the end, the work so far being saved; or another
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
    forks = [GenerationFork(generation, step) for generation, step in job.forks]
    learner = Learner(
        job.trainer, layout, job.model_path, device, generation=forks[-1].generation, seed=job.seed
    )
    # Tokens are as old as they were: this is no new start of the recorded run.
    learner.state = msgspec.structs.replace(learner.state, forks=forks)
    coordinator = None
    if dist.get_rank() == 0:
        learner.clean()
        coordinator = make_replay_coordinator(
            learner, layout, job.trainer, job.first_step, job.last_step, stop
        )
    finished = run_loop(learner, coordinator, stop)
    learner.close()
    return finished

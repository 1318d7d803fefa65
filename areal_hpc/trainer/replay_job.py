"""Recorded batches trained on again: `areal_hpc.trainer.replay_job:run`, once per rank.

Learner, loop and checkpoints are those of a run. Nobody is sent the weights.
"""

import sys
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.metrics.writer import MetricsWriter
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.quarantine import read_quarantine
from areal_hpc.trainer.config import ReplayJobConfig
from areal_hpc.trainer.learner import Learner
from areal_hpc.trainer.loop.loop import Coordinator, run_loop
from areal_hpc.trainer.loop.schedule import Schedule
from areal_hpc.trainer.loop.step_record import StepRecord
from areal_hpc.trainer.process_groups import run_rank
from areal_hpc.wire.weight_version import GenerationFork


def run(config: dict[str, Any]) -> None:
    job = ReplayJobConfig.model_validate(config)
    sys.path[:0] = [folder for folder in job.sys_path if folder not in sys.path]
    run_rank(job, StopRequest.install(), _run_replay)


def _run_replay(
    job: ReplayJobConfig, paths: RunPaths, device: torch.device, stop: StopRequest
) -> bool:
    forks = [GenerationFork(generation, step) for generation, step in job.forks]
    learner = Learner(
        job.trainer, paths, job.model_path, device,
        generation=forks[-1].generation, seed=job.seed,
        is_stop_requested=lambda: stop.requested,
    )  # fmt: skip
    # Tokens are as old as they were: this is no new start of the recorded run.
    learner.state = msgspec.structs.replace(learner.state, forks=forks)
    coordinator = None
    if dist.get_rank() == 0:
        learner.checkpoints.delete_leftovers(learner.state.generation)
        coordinator = make_replay_coordinator(
            learner, paths, job.trainer, job.first_step, job.last_step, stop
        )
    finished = run_loop(learner, coordinator, stop)
    learner.close()
    return finished


def make_replay_coordinator(
    learner: Learner,
    paths: RunPaths,
    config: TrainerConfig,
    first_step: int,
    last_step: int,
    stop: StopRequest,
) -> Coordinator:
    """Rank 0's decisions in a replay; its rows of metrics begin with `first_step`."""
    version = learner.version
    metrics = MetricsWriter(paths.metrics, None, version.step)
    if version.step >= first_step:  # its row was held back until the checkpoint was durable
        metrics.write(version.step, metrics.reopened or learner.reopened_row)
    schedule = Schedule(
        total_steps=last_step,
        checkpoint_every_steps=config.checkpoint_every_steps,
        export_every_steps=None,
    )
    record = StepRecord(metrics, version, None)
    return Coordinator(
        schedule,
        record,
        partial(read_manifest, paths),
        stop,
        read_quarantine=partial(read_quarantine, paths),
    )

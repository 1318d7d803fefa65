"""One rank of a training job, from joining the others to leaving them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from areal_hpc.jobs.signals import StopRequest
from areal_hpc.jobs.topology import get_task_position
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.collectives import report_first_failure
from areal_hpc.trainer.config import RankJobConfig, SftJobConfig
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.process_groups import destroy_process_groups, init_process_groups

JobT = TypeVar("JobT", bound=RankJobConfig)


def run_rank(
    job: JobT,
    sizes: TrainerConfig | SftJobConfig,
    stop: StopRequest,
    train: Callable[[JobT, RunPaths, torch.device, StopRequest], bool],
) -> None:
    """Join the other ranks, take this one's part in the work, and leave.

    `train` is the work; it says whether that came to its end. A stop ends the waiting for other
    ranks, too.

    Raises:
        SystemExit: Stopped by a signal before the end, the work so far being saved; or another
            rank failed.
    """
    megatron_cpu.patch_megatron_for_cpu()
    paths = RunPaths(job.run_dir)
    device = init_process_groups(
        get_task_position(),
        sizes.parallel,
        sizes.device,
        paths.rendezvous_dir,
        is_cancelled=lambda: stop.requested,
    )
    with report_first_failure():
        finished = train(job, paths, device, stop)
    destroy_process_groups()
    if not finished:
        raise SystemExit(STOPPED_EXIT_CODE)

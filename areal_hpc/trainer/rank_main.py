"""One rank of a training job, from joining the others to leaving them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from areal_hpc.jobs.signals import StopRequest
from areal_hpc.jobs.topology import get_task_position
from areal_hpc.recipe.sections.trainer import ParallelConfig
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.trainer.collectives import report_first_failure
from areal_hpc.trainer.model.cpu import megatron_cpu
from areal_hpc.trainer.process_groups import destroy_process_groups, init_process_groups


def run_rank(
    parallel: ParallelConfig,
    device: Literal["auto", "cpu", "cuda"],
    rendezvous_dir: Path,
    stop: StopRequest,
    train: Callable[[torch.device], bool],
) -> None:
    """Join the other ranks, take this one's part in the work, and leave.

    Args:
        parallel: How many ranks there are, and how they are grouped.
        device: Where this rank computes.
        rendezvous_dir: Where ranks find one another.
        stop: Ends the waiting for others, too.
        train: The work; whether it came to its end.

    Raises:
        SystemExit: Stopped by a signal before the end, the work so far being saved; or another
            rank failed.
    """
    megatron_cpu.patch_megatron_for_cpu()
    own = init_process_groups(
        get_task_position(), parallel, device, rendezvous_dir, is_cancelled=lambda: stop.requested
    )
    with report_first_failure():
        finished = train(own)
    destroy_process_groups()
    if not finished:
        raise SystemExit(STOPPED_EXIT_CODE)

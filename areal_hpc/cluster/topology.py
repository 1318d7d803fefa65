"""Where this process stands in its job: rank, world size, node."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskPosition:
    """One task among the tasks of its job (on Slurm: one srun task)."""

    rank: int
    num_tasks: int
    local_rank: int
    node_rank: int
    host: str

    @property
    def is_first(self) -> bool:
        """Rank 0: the task that speaks for the job."""
        return self.rank == 0


def current_task() -> TaskPosition:
    """This process's position, as its supervisor passed it on; a lone process is rank 0 of 1."""
    environ = os.environ
    return TaskPosition(
        rank=int(environ.get("AREAL_HPC_RANK", "0")),
        num_tasks=int(environ.get("AREAL_HPC_NUM_TASKS", "1")),
        local_rank=int(environ.get("AREAL_HPC_LOCAL_RANK", "0")),
        node_rank=int(environ.get("AREAL_HPC_NODE_RANK", "0")),
        host=socket.gethostname(),
    )


def advertised_host() -> str:
    """The address other nodes reach this one by: loopback unless the site names an interface."""
    return os.environ.get("AREAL_HPC_HOST", "127.0.0.1")


def launched_position(environ: Mapping[str, str]) -> TaskPosition:
    """This task's position as Slurm (or submitit's local executor) tells it."""
    if "SLURM_PROCID" in environ and "SUBMITIT_LOCAL_GLOBALID" not in environ:
        return TaskPosition(
            rank=int(environ["SLURM_PROCID"]),
            num_tasks=int(environ["SLURM_NTASKS"]),
            local_rank=int(environ["SLURM_LOCALID"]),
            node_rank=int(environ["SLURM_NODEID"]),
            host=socket.gethostname(),
        )
    return TaskPosition(
        rank=int(environ.get("SUBMITIT_LOCAL_GLOBALID", "0")),
        num_tasks=int(environ.get("SUBMITIT_LOCAL_NTASKS", "1")),
        local_rank=int(environ.get("SUBMITIT_LOCAL_LOCALID", "0")),
        node_rank=0,
        host=socket.gethostname(),
    )

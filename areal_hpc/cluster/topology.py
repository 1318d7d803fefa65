"""Where this process stands in its job: rank, world size, node. Read from the launcher's environment."""

from __future__ import annotations

import os
import socket
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
    """This process's position, as the job's supervisor passed it on. A lone process is rank 0 of 1."""
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

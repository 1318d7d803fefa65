"""Configuration of the rollout driver's process."""

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.wire.ledger import TaskSplit


class RolloutJobConfig(ProcessConfig):
    ENTRY = "areal_hpc.rollout.job:run"
    ROLE = "agents"

    cell: str
    """Cell that it drives: `cell-0`, `cell-1`, ..., or `evaluation`."""
    splits: tuple[TaskSplit, ...] = ("train", "valid")
    """Task splits from which it leases tickets."""
    sys_path: tuple[str, ...] = ()
    """Folders to import the agent from."""

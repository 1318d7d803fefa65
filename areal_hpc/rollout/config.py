"""Facts that the rollout driver is told."""

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.wire.ledger import TaskSplit


class RolloutJobConfig(ProcessConfig):
    ENTRY = "areal_hpc.rollout.job:run"
    ROLE = "agents"

    cell: str
    """The cell it drives: `cell-0`, `cell-1`, ..., or `evaluation`."""
    splits: tuple[TaskSplit, ...] = ("train", "valid")
    """What it takes tickets of."""
    sys_path: tuple[str, ...] = ()
    """Folders from which the agent is imported."""

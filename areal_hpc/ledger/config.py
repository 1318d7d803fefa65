"""Typed configuration of the ledger process."""

from typing import Annotated

from pydantic import Field

from areal_hpc.evaluation.set_metrics import DEFAULT_PASS_REWARD
from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.ledger.admission import TicketPolicy
from areal_hpc.ledger.tasks.task_stream import TaskSource
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.wire.ledger import StaleGroupPolicy


class LedgerEvaluationSet(BaseConfig):
    """What the ledger needs to know of an evaluation set."""

    number: Annotated[int, Field(ge=0)]
    """Its place, from which the numbers of its tickets follow."""
    n_tasks: Annotated[int, Field(ge=1)]
    """Tasks that there are."""
    n_samples: Annotated[int, Field(ge=1)] = 1
    """Episodes of each."""
    metrics: tuple[str, ...] = ("avg@k",)
    """What is computed of their rewards."""
    pass_reward: float = DEFAULT_PASS_REWARD
    """A sample with at least this reward passes."""


class LedgerJobConfig(ProcessConfig):
    """Configuration of the ledger process."""

    ENTRY = "areal_hpc.ledger.job:run"
    ROLE = "train"

    batch_size: Annotated[int, Field(ge=1)]
    """In tickets."""
    episodes_per_ticket: Annotated[int, Field(ge=1)]
    """Episodes started for a training ticket."""
    max_head_offpolicyness: Annotated[int, Field(ge=0)]
    """Largest age of a ticket's first weights, in versions, when it is trained on."""
    stale_groups: StaleGroupPolicy = "train_with_correction"
    """Handling of a ticket that is older than that when its batch is formed."""
    max_concurrent_rollouts: Annotated[int, Field(ge=1)]
    """Episodes in flight over all cells."""
    seed: int
    """Decides the order of tasks and the seed of every ticket."""
    n_train_tasks: Annotated[int, Field(ge=1)]
    """Lines of the training set."""
    task_sources: tuple[TaskSource, ...] = ()
    """Its parts in the order of lines, if there are several."""
    evaluation_sets: dict[str, LedgerEvaluationSet] = Field(default_factory=dict)
    evaluates: dict[str, int] = Field(default_factory=dict)
    """Sets to evaluate on the weights that replicas load, with their tasks, and then to end the
    run; empty: a trainer asks for evaluations."""
    total_steps: Annotated[int, Field(ge=1)]
    cell_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """A cell silent for longer has lost its tickets."""
    curriculum: str = ""
    """`package.module:function` that weighs the tasks; empty: each has its turn."""
    sys_path: tuple[str, ...] = ()
    """Folders from which it is imported."""

    @property
    def ticket_policy(self) -> TicketPolicy:
        """Admission in units of tickets."""
        return TicketPolicy(
            batch_size=self.batch_size,
            max_head_offpolicyness=self.max_head_offpolicyness,
            max_concurrent_tickets=max(1, self.max_concurrent_rollouts // self.episodes_per_ticket),
            total_steps=self.total_steps,
            cell_timeout_s=self.cell_timeout_s,
            stale_groups=self.stale_groups,
        )

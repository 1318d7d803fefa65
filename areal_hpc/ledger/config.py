"""Configuration of the ledger's process."""

from typing import Annotated

from pydantic import Field

from areal_hpc.jobs.config import ProcessConfig
from areal_hpc.ledger.task_stream import TaskSource
from areal_hpc.recipe.sections.evaluation import EvaluationSet


class LedgerJobConfig(ProcessConfig):
    ENTRY = "areal_hpc.ledger.job:run"
    ROLE = "train"

    n_train_tasks: Annotated[int, Field(ge=1)]
    """Number of lines of the training set."""
    tasks_of_sources: tuple[int, ...] = ()
    """Numbers of lines of its parts, in their order, if there are several."""
    tasks_by_evaluation_set: dict[str, int] = Field(default_factory=dict)
    """Numbers of held-out tasks, by evaluation set."""
    evaluates: dict[str, int] = Field(default_factory=dict)
    """Numbers of tasks of the sets to evaluate on the weights that replicas load, after which the
    run ends; empty: a trainer requests evaluations."""
    cell_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Time without a heartbeat after which a cell loses its tickets."""
    sys_path: tuple[str, ...] = ()
    """Folders to import `rollout.curriculum` from."""

    @property
    def task_sources(self) -> tuple[TaskSource, ...]:
        if not self.tasks_of_sources:
            return (TaskSource(self.n_train_tasks),)
        sources = zip(self.tasks_of_sources, self.recipe.train_mixture, strict=True)
        return tuple(TaskSource(n_tasks, source.weight) for n_tasks, source in sources)

    @property
    def evaluation_sets(self) -> dict[str, EvaluationSet]:
        """Evaluation sets that have tasks, by name."""
        names = self.tasks_by_evaluation_set
        return {item.name: item for item in self.recipe.evaluation_sets if item.name in names}

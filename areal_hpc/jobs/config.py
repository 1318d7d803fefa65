"""Base class of the facts that a job's processes are told beside their run's recipe."""

from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import ProcessSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import read_run_recipe


class ProcessConfig(BaseConfig):
    """What the launcher alone knows of one process; all else it reads from the run's recipe."""

    ENTRY: ClassVar[str]
    """`package.module:function` that parses it."""
    ROLE: ClassVar[Literal["train", "agents"]]
    """Which environment's Python runs the process."""

    run_dir: Path

    @cached_property
    def recipe(self) -> Recipe:
        """The run's resolved recipe, which may hold secrets: no copy of it is written."""
        return Recipe.model_validate(read_run_recipe(RunPaths(self.run_dir).recipe))

    def build_process_spec(
        self,
        process_name: str,
        *,
        tasks: Literal["all", "first", "others"] = "all",
        restarts: int = 0,
        ends_job: bool = False,
        uses_gpus: bool = False,
        is_forked: bool = False,
        is_rank: bool = False,
        progress: str = "",
    ) -> ProcessSpec:
        """The process with this configuration; `ProcessSpec` explains the arguments."""
        return ProcessSpec(
            process_name,
            self.ROLE,
            self.ENTRY,
            self.model_dump(mode="json"),
            tasks=tasks,
            restarts=restarts,
            ends_job=ends_job,
            uses_gpus=uses_gpus,
            is_forked=is_forked,
            is_rank=is_rank,
            progress=progress,
        )

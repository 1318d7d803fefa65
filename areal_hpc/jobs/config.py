"""Base class of the typed configurations of a job's processes."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Literal

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.private_values import replace_private_values_by_references
from areal_hpc.rundir.jobs import ProcessSpec


class ProcessConfig(BaseConfig):
    """Configuration of one process, constructed by `launch` and parsed by the process."""

    ENTRY: ClassVar[str]
    """`package.module:function` that parses it."""
    ROLE: ClassVar[Literal["train", "agents"]]
    """Which environment's Python runs the process."""
    KEYS_BY_PRIVATE_FIELD: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Dotted keys of the recipe by fields whose values may be secrets: read when it starts."""

    run_dir: Path

    def get_recipe_keys_by_private_field(self) -> dict[str, str]:
        return dict(self.KEYS_BY_PRIVATE_FIELD)

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
            replace_private_values_by_references(
                self.model_dump(mode="json"), self.get_recipe_keys_by_private_field()
            ),
            tasks=tasks,
            restarts=restarts,
            ends_job=ends_job,
            uses_gpus=uses_gpus,
            is_forked=is_forked,
            is_rank=is_rank,
            progress=progress,
        )

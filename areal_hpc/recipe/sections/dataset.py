"""Recipe sections `train_dataset`, `valid_dataset` and `sft.dataset`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.hub_cache import parse_hub_files


class TaskSetConfig(BaseConfig):
    """Source of tasks: exactly one of `path`, `hub`, `generator`."""

    path: Path | None = None
    """JSON lines, `*.parquet`, a folder written by `datasets`' `save_to_disk`, or a folder of task
    folders in Harbor's format, present on every node."""
    hub: str | None = None
    """Files of a data set on the Hugging Face hub, read from the local cache: owner, name, optional
    `@` and revision, and a pattern, such as `openai/gsm8k/main/train-*.parquet`."""
    generator: str | None = None
    """`package.module:function` that returns rows: dicts that JSON can hold."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the generator."""
    to_task: str | None = None
    """`package.module:function` that converts a source's row to the agent's; None drops the row."""

    source_keys: ClassVar[tuple[str, ...]] = ("path", "hub", "generator")
    """Alternative keys; a source has exactly one of them."""
    key_hints: ClassVar[Mapping[str, str]] = {
        "files": "write hub: OWNER/NAME/FILES",
        "harbor": "write path: FOLDER",
        "revision": "write hub: OWNER/NAME@REVISION/FILES",
        "reasoning_gym": "write generator: areal_hpc.dataset.adapters:make_reasoning_tasks, with "
        "kwargs: {name: ..., size: ..., seed: ...}",
    }

    @model_validator(mode="after")
    def _check_source_keys(self) -> Self:
        if sum(bool(getattr(self, name)) for name in self.source_keys) != 1:
            raise ValueError(f"give exactly one of {', '.join(f'`{n}`' for n in self.source_keys)}")
        return self

    @field_validator("hub")
    @classmethod
    def _check_hub(cls, hub: str | None) -> str | None:
        if hub is not None:
            parse_hub_files(hub)
        return hub

    @property
    def is_harbor(self) -> bool:
        """Whether `path` is a task folder in Harbor's format, or contains some."""
        folder = self.path
        return folder is not None and (
            (folder / "task.toml").is_file() or any(folder.glob("*/task.toml"))
        )

    @property
    def source_key(self) -> str:
        """The one of `source_keys` that is set."""
        return next(name for name in self.source_keys if getattr(self, name))


SET_NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,31}$"


class MixtureSourceConfig(TaskSetConfig):
    """Source of tasks beside others."""

    name: Annotated[str, Field(pattern=rf"^$|{SET_NAME_PATTERN}")] = ""
    """Name in metrics, such as `reward/mean/NAME`; empty: the source's number, from 0."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Relative share of the tickets, with a precision of a thousandth."""
    workflow: str = ""
    """Dotted path of the agent for its tasks; empty: `rollout.workflow`."""
    workflow_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of its constructor."""
    objective: dict[str, Any] = Field(default_factory=dict)
    """Keys of `trainer.objective` that differ for its tasks; with `preset`, on top of that."""


class TrainTaskSetConfig(TaskSetConfig):
    """Source of training tasks: one, or several in `sources`."""

    sources: tuple[MixtureSourceConfig, ...] = ()
    """Several sources, mixed by weight: a list of sections with the following keys."""

    source_keys: ClassVar[tuple[str, ...]] = (*TaskSetConfig.source_keys, "sources")

    @model_validator(mode="after")
    def _check_sources_convert_their_rows(self) -> Self:
        if self.sources and self.to_task:
            raise ValueError(
                f"each of `sources` has a `to_task` of its own, got to_task={self.to_task} beside "
                "them: give it to the sources whose rows it converts"
            )
        return self

    @model_validator(mode="after")
    def _check_source_names(self) -> Self:
        names = [source.name for source in self.sources if source.name]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"two of `sources` have the name {doubled[0]}: give each a name of its own"
            )
        for name, source in zip(self.source_names, self.sources, strict=True):
            if source.workflow_kwargs and not source.workflow:
                raise ValueError(
                    f"source {name} has workflow_kwargs without a workflow: add its workflow"
                )
        return self

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources, or their numbers; none without `sources`."""
        return tuple(source.name or str(number) for number, source in enumerate(self.sources))

    def list_sources(self, key: str) -> list[tuple[TaskSetConfig, str]]:
        """List the sources with their keys in the recipe; `key` is that of this section."""
        if not self.sources:
            return [(self, key)]
        return [(source, f"{key}.sources.{index}") for index, source in enumerate(self.sources)]

"""`task.toml` of a Harbor task, schema 1.4 and before, and its unsupported keys.

The source is Harbor 0.24: its documentation of tasks, and its models.
"""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.base import BaseConfig, explain_validation_errors

NEWEST_SCHEMA = (1, 4)
_SIZE_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])B?", re.IGNORECASE)
_MIB_PER_UNIT = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}

NetworkMode = Literal["no-network", "public", "allowlist"]


class PhaseConfig(BaseConfig):
    network_mode: NetworkMode | None = None
    """Network of this phase; null: that of the environment."""
    allowed_hosts: tuple[str, ...] | None = None
    user: str | int | None = None


class AgentPhaseConfig(PhaseConfig):
    timeout_sec: Annotated[float | None, Field(gt=0)] = None


class VerifierPhaseConfig(PhaseConfig):
    timeout_sec: Annotated[float, Field(gt=0)] = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: tuple[dict[str, Any], ...] = ()


class EnvironmentSectionConfig(BaseConfig):
    network_mode: NetworkMode = "public"
    allowed_hosts: tuple[str, ...] | None = None
    allow_internet: bool | None = None
    """Older form of `network_mode`."""
    build_timeout_sec: Annotated[float, Field(gt=0)] = 600.0
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    """Number of processors; has no effect, as all sandboxes of a cell share its processors."""
    memory_mb: Annotated[int | None, Field(gt=0)] = None
    storage_mb: Annotated[int | None, Field(gt=0)] = None
    gpus: int | None = None
    gpu_types: tuple[str, ...] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: tuple[dict[str, Any], ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: dict[str, Any] | None = None
    workdir: str | None = None

    @field_validator("workdir")
    @classmethod
    def _check_work_dir(cls, work_dir: str | None) -> str | None:
        if work_dir and not work_dir.startswith("/"):
            raise ValueError("expected an absolute path, such as /app")
        return work_dir

    @model_validator(mode="before")
    @classmethod
    def _read_older_sizes(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        values = dict(section)
        for name in ("memory", "storage"):
            if name not in values:
                continue
            size = _SIZE_PATTERN.fullmatch(str(values.pop(name)).strip())
            if size is None:
                raise ValueError(f"`{name}` must be a size such as 2G")
            values.setdefault(f"{name}_mb", int(float(size[1]) * _MIB_PER_UNIT[size[2].upper()]))
        return values


class SolutionSectionConfig(BaseConfig):
    env: dict[str, str] = Field(default_factory=dict)


class HarborTaskFile(BaseConfig):
    """Contents of a file `task.toml`."""

    schema_version: str = "1.4"
    task: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)
    source: str | None = None
    agent: AgentPhaseConfig = AgentPhaseConfig()
    verifier: VerifierPhaseConfig = VerifierPhaseConfig()
    environment: EnvironmentSectionConfig = EnvironmentSectionConfig()
    solution: SolutionSectionConfig = SolutionSectionConfig()
    steps: tuple[dict[str, Any], ...] | None = None
    multi_step_reward_strategy: str | None = None
    """Rule that combines the rewards of steps."""
    artifacts: tuple[Any, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _rename_version(cls, content: Any) -> Any:
        if isinstance(content, dict) and "version" in content:
            return {"schema_version": content["version"]} | {
                name: value for name, value in content.items() if name != "version"
            }
        return content

    @field_validator("schema_version")
    @classmethod
    def _check_version(cls, schema_version: str) -> str:
        parts = schema_version.split(".")
        if not all(part.isdigit() for part in parts) or tuple(map(int, parts)) > NEWEST_SCHEMA:
            raise ValueError("expected a schema version of at most 1.4")
        return schema_version

    @property
    def has_agent_network(self) -> bool:
        """Whether the agent's commands may reach more than the model."""
        mode = self.agent.network_mode or self.environment.network_mode
        if self.agent.network_mode is None and self.environment.allow_internet is False:
            return False
        return mode == "public"


def read_supported_task_file(path: Path) -> HarborTaskFile:
    """Read a task file, or raise RecipeError if it is invalid or unsupported."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path} cannot be read as TOML: {error}", key=str(path)) from error
    try:
        task = HarborTaskFile.model_validate(values)
    except ValidationError as error:
        raise RecipeError.from_problems(
            explain_validation_errors(error.errors(), HarborTaskFile, f"{path}: ")
        ) from None
    if problems := [*find_unsupported(task, path)]:
        raise RecipeError.from_problems(problems)
    return task


def find_unsupported(task: HarborTaskFile, path: Path) -> Iterator[Problem]:
    """Yield a problem for each key of a task that a sandbox does not support."""
    agent, verifier, environment = task.agent, task.verifier, task.environment
    refused = {
        "steps": (bool(task.steps), "a task has one step here", "make a task of each step"),
        "verifier.environment_mode": (
            verifier.environment_mode == "separate" or verifier.environment is not None,
            "the tests run in the agent's sandbox, after its end",
            "use environment_mode='shared' without [verifier.environment]",
        ),
        "verifier.collect": (bool(verifier.collect), "there are no services", "do it in test.sh"),
        "environment.os": (environment.os.lower() != "linux", "sandboxes have Linux", ""),
        "environment.gpus": (bool(environment.gpus), "sandboxes have no GPU", ""),
        "environment.tpu": (environment.tpu is not None, "sandboxes have no TPU", ""),
        "environment.mcp_servers": (
            bool(environment.mcp_servers),
            "commands of a sandbox start no servers of tools",
            "give them to the agent: areal_hpc.agents.gym_agents.McpAgent",
        ),
        "environment.skills_dir": (environment.skills_dir is not None, "there are no skills", ""),
        "environment.healthcheck": (
            environment.healthcheck is not None,
            "a sandbox starts no service to wait for",
            "start it in test.sh",
        ),
    }
    for name, phase in (("agent", agent), ("verifier", verifier), ("environment", environment)):
        refused[f"{name}.network_mode"] = (
            phase.network_mode == "allowlist" or bool(phase.allowed_hosts),
            f"a sandbox cannot filter by host (allowed_hosts={list(phase.allowed_hosts or ())})",
            "use network_mode='no-network'",
        )
    for name, user in (("agent", agent.user), ("verifier", verifier.user)):
        refused[f"{name}.user"] = (
            user is not None,
            f"a sandbox has one user, and is not {user!r}",
            "remove it",
        )
    default = agent.network_mode or environment.network_mode
    if verifier.network_mode not in (None, "allowlist", default):
        refused["verifier.network_mode"] = (
            True,
            f"one sandbox has one network: {default!r} of the agent, {verifier.network_mode!r} of "
            "the tests",
            "use the same for both",
        )
    for key, (is_used, reason, hint) in refused.items():
        if is_used:
            yield Problem(f"{key} is not supported: {reason}", f"{path}: {key}", hint)
    for section in ("environment", "verifier", "solution"):
        for name, value in getattr(task, section).env.items():
            if "${" in value:
                yield Problem(
                    f"{section}.env.{name} refers to a variable of this machine",
                    f"{path}: {section}.env.{name}",
                    "write its value; the model sees all variables of a sandbox",
                )

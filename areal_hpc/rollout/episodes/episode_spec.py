"""Specification of one episode: its task, session, seed and limits, from recipe and task."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import EpisodeLimitsConfig, RolloutConfig
from areal_hpc.rollout.agent import Agent, RolloutWorkflow
from areal_hpc.rollout.episodes.auxiliary import AuxiliaryRule
from areal_hpc.wire.proxy import SamplingDefaults, SessionLimits, StartSessionRequest

TASK_LIMITS_KEY = "limits"
"""Column of a task with limits of its own."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """Episode to run, as one member of a ticket's group."""

    session: StartSessionRequest
    """Request that opens its session."""
    data: dict[str, Any]
    """Task, as a copy for the agent."""
    timeout_s: float
    failure_reward: float | None = None
    """Reward of the episode if its agent fails; None: such an episode is not trained."""
    auxiliary: AuxiliaryRule | None = None
    """Rule for the conversations that are not trained; None: all are."""
    kept_files_dir: Path | None = None
    """Folder for the files of its sandbox that the recipe keeps; None: none are kept."""


class EpisodeLimits(EpisodeLimitsConfig):
    timeout_s: Annotated[float, Field(gt=0)]


def build_episode_spec(
    rollout: RolloutConfig,
    agent: Agent | None,
    task: dict[str, Any],
    name: str,
    *,
    sampling: SamplingDefaults,
    seed: int,
    auxiliary: AuxiliaryRule | None,
    failure_reward: float | None = None,
    kept_files_dir: Path | None = None,
    **session_fields: Any,
) -> EpisodeSpec:
    """Build the episode of a task; `session_fields` are further ones of `StartSessionRequest`.

    Raises:
        RecipeError: The task's limits are invalid.
    """
    limits = resolve_limits(rollout, task)
    # The clients of a workflow record calls and propagate rewards themselves.
    is_workflow = isinstance(agent, RolloutWorkflow)
    session = StartSessionRequest(
        name,
        sampling=sampling,
        seed=seed,
        export=rollout.agent.build_export_settings(is_workflow),
        limits=SessionLimits(limits.max_turns, limits.max_tokens),
        records_calls=is_workflow,
        sampling_from=rollout.agent.sampling,
        rights="all" if is_workflow else "calls",
        **session_fields,
    )
    return EpisodeSpec(session, task, limits.timeout_s, failure_reward, auxiliary, kept_files_dir)


def derive_episode_seed(ticket_seed: int, episode: int, failures: int) -> int:
    digest = hashlib.blake2b(f"{ticket_seed}/{episode}/{failures}".encode(), digest_size=4)
    return int.from_bytes(digest.digest()) >> 1


def resolve_limits(rollout: RolloutConfig, task: dict[str, Any]) -> EpisodeLimits:
    """Return the recipe's limits, overridden by those of the task."""
    recipe = {**rollout.limits.model_dump(), "timeout_s": rollout.episode_timeout_s}
    task_limits = task.get(TASK_LIMITS_KEY, {})
    try:
        if not isinstance(task_limits, dict):
            raise TypeError(f"got {task_limits!r:.100}")
        return EpisodeLimits.model_validate(recipe | task_limits)
    except (TypeError, ValidationError) as error:
        raise RecipeError(
            f"the task's limits cannot be read: {error}",
            key=TASK_LIMITS_KEY,
            hint=f"give any of {', '.join(recipe)}, or rename that key of the task",
        ) from error


def check_task_limits(
    rollout: RolloutConfig, session_timeout_s: float, task: dict[str, Any]
) -> None:
    """Check that a task's own limits are valid, and that its sessions outlive its episodes.

    A complete episode waits in its session for the others of its group, and the proxy keeps an
    unused session for `session_timeout_s`.

    Raises:
        RecipeError: The limits are invalid or too long.
    """
    if TASK_LIMITS_KEY not in task:
        return
    tries, timeout_s = rollout.max_episode_tries, resolve_limits(rollout, task).timeout_s
    if session_timeout_s < timeout_s * tries:
        raise RecipeError(
            f"proxy.session_timeout_s={session_timeout_s:.0f} is less than the "
            f"{timeout_s * tries:.0f} s that {tries} tries of {timeout_s:g} s take",
            key=TASK_LIMITS_KEY,
            hint=f"use proxy.session_timeout_s={timeout_s * tries:.0f} or more",
        )

"""One episode to run: its task, session, seed and limits, from the recipe and the task."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, ValidationError

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.rollout import EpisodeLimitsConfig, RolloutConfig
from areal_hpc.rollout.agent import Agent, RolloutWorkflow
from areal_hpc.rollout.episodes.auxiliary import AuxiliaryRule
from areal_hpc.wire.proxy import SamplingDefaults, SessionLimits, StartSessionRequest

TASK_LIMITS_KEY = "limits"
"""Where the row of a task has limits of its own."""


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One task to run, for one place in a ticket's group."""

    session: StartSessionRequest
    """The session that it is played in."""
    data: dict[str, Any]
    """The task: the agent's own copy."""
    timeout_s: float
    failure_reward: float | None = None
    """What it earns if its agent fails; None: such an episode is not trained."""
    auxiliary: AuxiliaryRule | None = None
    """Which of its conversations are not learned from; None: all are."""


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
    **session_fields: Any,
) -> EpisodeSpec:
    """The episode of a task as the recipe plays it; `session_fields` are `StartSessionRequest`'s.

    Raises:
        RecipeError: The task's limits are none.
    """
    limits = resolve_limits(rollout, task)
    # The clients of a workflow record calls, and have passed rewards back already.
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
    return EpisodeSpec(session, task, limits.timeout_s, failure_reward, auxiliary)


def derive_episode_seed(ticket_seed: int, episode: int, failures: int) -> int:
    digest = hashlib.blake2b(f"{ticket_seed}/{episode}/{failures}".encode(), digest_size=4)
    return int.from_bytes(digest.digest()) >> 1


def resolve_limits(rollout: RolloutConfig, task: dict[str, Any]) -> EpisodeLimits:
    """The recipe's limits, overridden by those of the task."""
    recipe = {**rollout.limits.model_dump(), "timeout_s": rollout.episode_timeout_s}
    own = task.get(TASK_LIMITS_KEY, {})
    try:
        if not isinstance(own, dict):
            raise TypeError(f"got {own!r:.100}")
        return EpisodeLimits.model_validate(recipe | own)
    except (TypeError, ValidationError) as error:
        raise RecipeError(
            f"the task's limits cannot be read: {error}",
            key=TASK_LIMITS_KEY,
            hint=f"give any of {', '.join(recipe)}, or rename that key of the task",
        ) from error


def check_task_limits(
    rollout: RolloutConfig, session_timeout_s: float, task: dict[str, Any]
) -> None:
    """Demand that a task's own limits can be read, and that its sessions outlive its episodes.

    An episode that ended well waits in its session for the others of its group, and the proxy keeps
    a session that nobody uses for `session_timeout_s`.

    Raises:
        RecipeError: They cannot.
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

"""Trial episodes: an agent plays real tasks, and nothing of it is trained on."""

import asyncio
import logging
from typing import Any

from areal_hpc.errors import AgentError, Problem
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule_unless_keep
from areal_hpc.rollout.episodes.effective_limits import resolve_limits
from areal_hpc.rollout.episodes.episode import (
    EpisodeOutcome,
    EpisodeSpec,
    derive_episode_seed,
    run_episode,
)
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rollout.rollout_workflow import RolloutWorkflow
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.proxy import ProxyHealth, SamplingDefaults, SessionLimits, StartSessionRequest

log = logging.getLogger(__name__)

ALL_TRIALS_TIMEOUT_S = 10.0
"""Longest that trial episodes hold up those of training: GPUs wait meanwhile."""
REPLICA_POLL_S = 0.25
RETRY_PAUSE_S = 0.25
TRIAL_SHORTAGE_PAUSE_S = 3.0
"""Before a trial for which the node lacked something is tried again."""


async def play_trial_episode(
    rollout: RolloutConfig,
    agent: Agent,
    task: dict[str, Any],
    episode_number: int,
    proxy: AsyncServiceClient,
    http_client: Any,
    sandboxes: AgentSandboxes | None = None,
) -> EpisodeOutcome:
    """Play one task as an episode of training would, in a session that belongs to no ticket.

    The proxy keeps what is said in memory alone, and forgets it soon after the end.
    """
    limits, is_workflow = resolve_limits(rollout, task), isinstance(agent, RolloutWorkflow)
    session = StartSessionRequest(
        f"trial-{episode_number}",
        sampling=SamplingDefaults(**rollout.sampling.model_dump()),
        seed=derive_episode_seed(episode_number, 0, 0),
        export=rollout.agent.build_export_settings(is_workflow),
        disposable=True,
        limits=SessionLimits(limits.max_turns, limits.max_tokens),
        records_calls=is_workflow,
        sampling_from=rollout.agent.sampling,
        records_sampling_mask=rollout.record_sampling_mask,
    )
    rule = load_auxiliary_rule_unless_keep(rollout.agent.auxiliary)
    own_task = {**task}  # another try gets its own
    spec = EpisodeSpec(session, own_task, limits.timeout_s, auxiliary=rule)
    return await run_episode(spec, agent, proxy, http_client, sandboxes)


async def play_trial_tasks_or_raise(
    rollout: RolloutConfig,
    agent: Agent,
    tasks: TaskSet,
    proxy: AsyncServiceClient,
    http_client: Any,
    events: EventLog,
    sandboxes: AgentSandboxes | None = None,
) -> None:
    """Play `rollout.trial_tasks` tasks side by side, until one ends well or none does.

    Waits for a replica that serves first. Trials that take long are given up: they hold nothing up
    for more than `ALL_TRIALS_TIMEOUT_S`.

    Raises:
        AgentError: The agent failed all of them, and in the same way.
    """
    while not (await proxy.call_until_answered("/healthz", None, ProxyHealth)).replicas_serving:
        await asyncio.sleep(REPLICA_POLL_S)
    count = min(rollout.trial_tasks, len(tasks))
    pending = {
        asyncio.create_task(
            _retry_trial_until_decided(
                rollout, agent, tasks[number], number, proxy, http_client, events, sandboxes
            )
        )
        for number in range(count)
    }
    failures: list[EpisodeOutcome] = []
    try:
        async with asyncio.timeout(ALL_TRIALS_TIMEOUT_S):
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for outcome in (trial.result() for trial in done):
                    if outcome.status == "ok":
                        log.info("the agent has played a trial task; reward %g", outcome.reward)
                        return
                    failures.append(outcome)
    except TimeoutError:
        log.info("trial tasks take longer than %.0f s: training starts", ALL_TRIALS_TIMEOUT_S)
        return
    finally:
        for trial in pending:
            trial.cancel()
        if pending:
            await asyncio.wait(pending)
    errors = [outcome.error for outcome in failures if outcome.error is not None]
    if len({error.cause for error in errors}) == 1:
        problem = errors[-1].problems[0]
        raise AgentError(
            f"the agent failed all {count} trial tasks, {rollout.max_episode_tries} times each: "
            f"{problem.message}",
            key=problem.key,
            hint=problem.hint or "areal-hpc try RECIPE plays them without a run",
            kind=errors[-1].kind,
            trace=errors[-1].trace,
        )


async def _retry_trial_until_decided(
    rollout: RolloutConfig,
    agent: Agent,
    task: dict[str, Any],
    episode_number: int,
    proxy: AsyncServiceClient,
    http_client: Any,
    events: EventLog,
    sandboxes: AgentSandboxes | None,
) -> EpisodeOutcome:
    failures = 0
    while True:
        outcome = await play_trial_episode(
            rollout, agent, task, episode_number, proxy, http_client, sandboxes
        )
        if outcome.status == "ok":
            return outcome
        problem = outcome.error.problems[0] if outcome.error else Problem("")
        events.record(
            f"episode_{outcome.status}",
            trial=episode_number,
            kind=outcome.error.kind if outcome.error else outcome.status,
            message=problem.message,
            at=problem.key,
            hint=problem.hint,
            reason=outcome.reason,
        )
        failures += outcome.status in ("failed", "timed_out")
        if failures == rollout.max_episode_tries:
            return outcome
        await asyncio.sleep(TRIAL_SHORTAGE_PAUSE_S if outcome.is_node_short else RETRY_PAUSE_S)

"""Trial episodes: an agent plays real tasks, and nothing of it is trained on."""

import asyncio
import logging
from typing import Any

from areal_hpc.errors import AgentError
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule
from areal_hpc.rollout.episodes.episode import EpisodeOutcome, run_episode
from areal_hpc.rollout.episodes.episode_spec import build_episode_spec, derive_episode_seed
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.proxy import ProxyHealth, SamplingDefaults

log = logging.getLogger(__name__)

ALL_TRIALS_TIMEOUT_S = 10.0
"""Longest that trial episodes hold up those of training: GPUs wait meanwhile."""
REPLICA_POLL_S = 0.25
RETRY_PAUSE_S = 0.25


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
    spec = build_episode_spec(
        rollout,
        agent,
        {**task},  # another try gets its own
        f"trial-{episode_number}",
        sampling=SamplingDefaults(**rollout.sampling.model_dump()),
        seed=derive_episode_seed(episode_number, 0, 0),
        auxiliary=load_auxiliary_rule(rollout.agent.auxiliary),
        records_sampling_mask=rollout.record_sampling_mask,
        disposable=True,
    )
    return await run_episode(spec, agent, proxy, http_client, sandboxes)


async def play_trial_tasks(
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

    async def retry(number: int) -> EpisodeOutcome:
        failures = 0
        while True:
            outcome = await play_trial_episode(
                rollout, agent, tasks[number], number, proxy, http_client, sandboxes
            )
            if outcome.status == "ok":
                return outcome
            fault = outcome.describe_fault() | {"reason": outcome.reason}
            events.record(f"episode_{outcome.status}", trial=number, **fault)
            failures += outcome.status in ("failed", "timed_out")
            if failures == rollout.max_episode_tries:
                return outcome
            await asyncio.sleep(RETRY_PAUSE_S)

    while not (await proxy.call_until_answered("/healthz", None, ProxyHealth)).replicas_serving:
        await asyncio.sleep(REPLICA_POLL_S)
    count = min(rollout.trial_tasks, len(tasks))
    trials = [asyncio.create_task(retry(number)) for number in range(count)]
    errors: list[AgentError] = []
    try:
        async with asyncio.timeout(ALL_TRIALS_TIMEOUT_S):
            for trial in asyncio.as_completed(trials):
                outcome = await trial
                if outcome.status == "ok":
                    log.info("the agent has played a trial task; reward %g", outcome.reward)
                    return
                errors += [outcome.error] if outcome.error is not None else []
    except TimeoutError:
        log.info("trial tasks take longer than %.0f s: training starts", ALL_TRIALS_TIMEOUT_S)
        return
    finally:
        for task in trials:
            task.cancel()
        await asyncio.gather(*trials, return_exceptions=True)
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

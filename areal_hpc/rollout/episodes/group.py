"""Groups of episodes: those of a ticket run concurrently, each until it succeeds."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from areal_hpc.errors import AgentError, ClusterError, HttpStatusError, NodeResourceShortageError
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.recipe.sections.rollout import RolloutConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episode_watch import EpisodeWatch
from areal_hpc.rollout.episodes.auxiliary import load_auxiliary_rule
from areal_hpc.rollout.episodes.episode import (
    EpisodeOutcome,
    offer_episode_to_external_program,
    run_episode,
)
from areal_hpc.rollout.episodes.episode_spec import (
    EpisodeSpec,
    build_episode_spec,
    derive_episode_seed,
)
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rundir.run_inputs import NO_SOURCES, TaskSet, TrainSources
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.spans import time_span
from areal_hpc.wire.ledger import TicketGrant, TicketRef
from areal_hpc.wire.proxy import (
    MAX_CAUSE_CHARS,
    MAX_ERROR_CHARS,
    KeepFailedSessionReply,
    KeepFailedSessionRequest,
    ProxyHealth,
    SamplingDefaults,
)
from areal_hpc.wire.retry import Backoff

log = logging.getLogger(__name__)

TRAIN = "train"
"""Name of the training tickets' task set; those of evaluation sets have the sets' names."""
CLOSED_GATE_POLL_S = 0.25
"""Time between two requests to the proxy while no replica serves; an open gate sends none."""
RETRY_BACKOFF = Backoff(0.25, 10.0)
"""Pause between tries, so that an agent does not use them up during a short outage."""
AGENT_FAULT_EPISODE_STATUSES = ("failed", "timed_out")
"""Statuses of an episode that use up one of its tries."""
SHORTAGE_PAUSE_S = 15.0
"""Pause before an episode for which the node lacked something is tried again."""
MAX_SHORTAGE_S = 900.0
"""Duration of a shortage for one of its episodes after which a ticket is dropped."""


class ReplicaGate:
    """Gate that holds back a cell's episodes while none of its replicas serves.

    It opens when the proxy reports a serving replica, and closes when an episode found none.
    """

    def __init__(self, proxy: AsyncServiceClient) -> None:
        self._proxy = proxy
        self.opened = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self.opened.is_set()

    async def run(self, on_open: Callable[[], None]) -> None:
        """Poll the proxy while the gate is closed, until cancelled."""
        while True:
            if not self.is_open:
                health = await self._proxy.call_repeatedly("/healthz", None, ProxyHealth)
                if health.replicas_serving:
                    self.opened.set()
                    on_open()
            await asyncio.sleep(CLOSED_GATE_POLL_S)


class GroupPlayer:
    """Player of the groups of a cell's tickets, while the cell's replicas serve.

    Agents and tasks are those of `train` and of every evaluation set, by name. An agent is None if
    external programs play the episodes. If the training set has several sources, `source_agents`
    has the agent of each.

    Raises:
        RecipeError: A function that the recipe names cannot be imported.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        evaluation_sets: Sequence[EvaluationSet],
        *,
        agents: Mapping[str, Agent | None],
        tasks: Mapping[str, TaskSet],
        proxy: AsyncServiceClient,
        http_client: Any,
        events: EventLog,
        sandboxes: AgentSandboxes | None = None,
        sources: TrainSources = NO_SOURCES,
        source_agents: Sequence[Agent | None] = (),
        kept_files_dir: Path | None = None,
    ) -> None:
        self._rollout, self._agents, self._tasks = rollout, agents, tasks
        self._sources, self._source_agents = sources, source_agents
        self._proxy, self._http_client = proxy, http_client
        self._events, self._sandboxes = events, sandboxes
        self._kept_files_dir = kept_files_dir
        sampling = {eval_set.name: eval_set.sampling for eval_set in evaluation_sets}
        self._sampling = {
            name: SamplingDefaults(**config.model_dump())
            for name, config in {TRAIN: rollout.sampling, **sampling}.items()
        }
        self._set_names = {eval_set.number: eval_set.name for eval_set in evaluation_sets}
        self._find_rejection = load_group_filter(rollout)
        self._auxiliary = load_auxiliary_rule(rollout.agent.auxiliary)
        self.gate, self.watch = ReplicaGate(proxy), EpisodeWatch(events)

    async def play(
        self, grant: TicketGrant, on_episode_end: Callable[[], None]
    ) -> list[EpisodeOutcome]:
        """Play a ticket's group, and return the outcomes of its members, in order.

        `on_episode_end` is called for each of its episodes, also for cancelled ones.

        Raises:
            AgentError: Too few episodes succeeded.
            NodeResourceShortageError: The node lacked something for too long.
            RecipeError: The task's limits cannot be read.
            ClusterError: The task is of an evaluation set that this process has not read of.
        """
        set_name, size, min_size = self._get_set_name(grant.ref), grant.n_episodes, 1
        if set_name == TRAIN:
            size, min_size = self._rollout.n_samples, self._rollout.min_group_size
        members = range(grant.n_episodes)
        episodes = [self._run_episode(grant, set_name, n, on_episode_end) for n in members]
        outcomes, failed = await run_group(episodes, size, min_size)
        if surplus := len(episodes) - len(outcomes) - len(failed):
            reason = "cancelled: enough episodes of the group are complete"
            self._record("episodes_cancelled", grant, reason, count=surplus)
        if failed:
            self._record("group_incomplete", grant, str(failed[-1]), count=len(failed))
        last_error = outcomes[-1].error
        if len(outcomes) > 1 and last_error and all(end.has_failure_reward for end in outcomes):
            raise _prefix_error_message(
                last_error,
                f"all {len(outcomes)} episodes of task {grant.task_index} failed; last error: ",
            )
        return outcomes

    def find_rejection(self, grant: TicketGrant, rewards: Sequence[float]) -> str:
        """Return the reason why a training ticket's group is rejected, or an empty string."""
        return self._find_rejection(self._tasks[TRAIN][grant.task_index], rewards)

    def _get_set_name(self, ref: TicketRef) -> str:
        if ref.eval_step < 0:
            return TRAIN
        number, _ = split_ticket_id(ref.ticket_id)
        if number not in self._set_names:
            raise ClusterError(
                f"ticket {ref.ticket_id} is of evaluation set {number}; this driver's recipe has "
                f"{', '.join(self._set_names.values()) or 'none'}",
                key="evaluation.sets",
                hint="submit the run again: a cell that starts anew reads the trainer's recipe",
            )
        return self._set_names[number]

    def _get_agent(self, grant: TicketGrant, set_name: str) -> Agent | None:
        if set_name == TRAIN and self._source_agents:
            return self._source_agents[self._sources.find_index(grant.task_index)]
        return self._agents[set_name]

    def _record(self, event: str, grant: TicketGrant, reason: str, **event_fields: Any) -> None:
        self._events.record(event, **build_ticket_facts(grant), **event_fields, reason=reason)

    async def _run_episode(
        self, grant: TicketGrant, set_name: str, episode: int, on_end: Callable[[], None]
    ) -> EpisodeOutcome:
        """Repeat one episode until it succeeds, or has used up its tries."""
        is_training = set_name == TRAIN
        tries = self._rollout.tries_per_episode if is_training else self._rollout.max_episode_tries
        failures, short_since_s = 0, float("inf")
        try:
            while True:
                await self.gate.opened.wait()
                spec = self._build_episode_spec(grant, set_name, episode, failures)
                outcome = await self._play_once(grant, set_name, spec)
                if outcome.is_node_short:
                    short_since_s = min(short_since_s, time.monotonic())
                    if time.monotonic() - short_since_s >= MAX_SHORTAGE_S:
                        raise NodeResourceShortageError(
                            f"an episode could not be played for {MAX_SHORTAGE_S:g} s, the last "
                            f"time because of: {outcome.reason}"
                        )
                    await asyncio.sleep(SHORTAGE_PAUSE_S)
                    continue
                short_since_s = float("inf")
                if outcome.status == "ok" or outcome.has_failure_reward:
                    return outcome
                if outcome.status == "unserved":
                    self.gate.opened.clear()
                if outcome.status not in AGENT_FAULT_EPISODE_STATUSES or outcome.error is None:
                    await asyncio.sleep(RETRY_BACKOFF.min_s)
                    continue
                await self._keep_failed_session(outcome)
                failures += 1
                if failures == tries:
                    times = "once" if tries == 1 else f"{tries} times"
                    raise _prefix_error_message(
                        outcome.error,
                        f"episode {episode} of task {grant.task_index} failed {times}; "
                        "last error: ",
                    )
                await asyncio.sleep(RETRY_BACKOFF.get_pause_s(failures))
        finally:
            on_end()

    def _build_episode_spec(
        self, grant: TicketGrant, set_name: str, episode: int, failures: int
    ) -> EpisodeSpec:
        ref, is_training = grant.ref, set_name == TRAIN
        return build_episode_spec(
            self._rollout,
            self._get_agent(grant, set_name),
            self._tasks[set_name][grant.task_index],
            f"{set_name}-{ref.ticket_id}-{ref.attempt}-{episode}",
            sampling=self._sampling[set_name],
            seed=derive_episode_seed(grant.seed, episode, failures),
            auxiliary=self._auxiliary,
            failure_reward=self._rollout.failure_reward if is_training else None,
            kept_files_dir=self._kept_files_dir if is_training else None,
            records_sampling_mask=self._rollout.record_sampling_mask and is_training,
            ref=ref,
            episode=episode,
            task_index=grant.task_index,
        )

    async def _play_once(
        self, grant: TicketGrant, set_name: str, spec: EpisodeSpec
    ) -> EpisodeOutcome:
        agent, episode = self._get_agent(grant, set_name), spec.session.episode
        facts = {**build_ticket_facts(grant), "episode": episode}
        with time_span("episode", "episodes", **facts) as span_facts:
            if agent is None:
                outcome = await offer_episode_to_external_program(spec, self._proxy)
                took_s = 0.0
            else:
                name, watch_facts = spec.session.task_id, facts | {"limit_s": spec.timeout_s}
                with self.watch.follow_episode(name, watch_facts) as running:
                    outcome = await run_episode(
                        spec, agent, self._proxy, self._http_client, self._sandboxes
                    )
                took_s = running.age_s
            span_facts["status"] = outcome.status
        if outcome.status == "ok":
            self.watch.record_good_end(took_s)
        else:
            self._record_bad_end(grant, set_name, episode, outcome)
        return outcome

    def _record_bad_end(
        self, grant: TicketGrant, set_name: str, episode: int, outcome: EpisodeOutcome
    ) -> None:
        facts: dict[str, Any] = {"episode": episode}
        if outcome.error is not None and outcome.status in AGENT_FAULT_EPISODE_STATUSES:
            self.watch.record_failed_end()
            facts |= outcome.describe_fault()
            facts |= {"failed": self.watch.failed, "ended": self.watch.ended}
            if outcome.has_failure_reward:
                facts |= {"reward": outcome.reward, "then": f"it earns {outcome.reward:g}"}
            elif set_name == TRAIN and self._rollout.failed_episodes == "drop":
                facts["then"] = "it is left out"
        self._record(f"episode_{outcome.status}", grant, outcome.reason, **facts)

    async def _keep_failed_session(self, outcome: EpisodeOutcome) -> None:
        cause = outcome.status if outcome.error is None else outcome.error.cause
        request = KeepFailedSessionRequest(
            outcome.session_id, cause[:MAX_CAUSE_CHARS], outcome.reason[:MAX_ERROR_CHARS]
        )
        try:
            await self._proxy.call_repeatedly("/rl/keep_failed", request, KeepFailedSessionReply)
        except HttpStatusError as refusal:  # the proxy restarted and lost the session
            log.warning("the failed episode %s is not kept: %s", outcome.session_id, refusal)


async def run_group(
    episodes: Sequence[Coroutine[Any, Any, EpisodeOutcome]],
    wanted_successes: int,
    min_successes: int,
) -> tuple[list[EpisodeOutcome], list[AgentError]]:
    """Run episodes until the first `wanted_successes` have succeeded, and cancel the rest.

    Each succeeds, or raises AgentError when it has failed for good.

    Returns:
        The outcomes of the group's members, in order, and the errors of failed episodes.

    Raises:
        AgentError: Fewer than `min_successes` can still succeed.
        Exception: Any other error of an episode.
    """
    tasks = [asyncio.create_task(episode) for episode in episodes]
    pending, failed = set(tasks), list[AgentError]()
    try:
        while pending and len(tasks) - len(pending) - len(failed) < wanted_successes:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for error in (task.exception() for task in done):
                if isinstance(error, AgentError):
                    failed.append(error)
                elif error is not None:
                    raise error
            if len(tasks) - len(failed) < min_successes:
                raise failed[-1]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    succeeded = [task for task in tasks if task not in pending and task.exception() is None]
    return [task.result() for task in succeeded[:wanted_successes]], failed


def load_group_filter(rollout: RolloutConfig) -> Callable[[dict[str, Any], Sequence[float]], str]:
    """Build the recipe's filter, which returns the reason to reject a group, or an empty string.

    Its arguments are the task and the rewards of the episodes. It raises AgentError if the user's
    function raises, or does not return a bool.

    Raises:
        RecipeError: The user's function cannot be imported.
    """
    name = rollout.should_accept
    accept = load_user_function(name, "rollout.should_accept") if name else None

    def find_rejection(task: dict[str, Any], rewards: Sequence[float]) -> str:
        if rollout.filter_same_reward and len(set(rewards)) == 1:
            return f"all {len(rewards)} rewards are {rewards[0]:g}"
        if accept is None:
            return ""
        try:
            answer = accept({"rewards": np.asarray(rewards, dtype=np.float32), "task": task})
        except Exception as error:  # boundary: the function is the user's code
            raise AgentError(f"{name} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool | np.bool_):
            raise AgentError(
                f"{name} returned {answer!r:.200} ({type(answer).__name__}), expected a bool"
            )
        return "" if answer else f"{name} rejected the rewards {list(rewards)}"

    return find_rejection


def build_ticket_facts(grant: TicketGrant) -> dict[str, Any]:
    return {**msgspec.structs.asdict(grant.ref), "task": grant.task_index}


def _prefix_error_message(error: AgentError, prefix: str) -> AgentError:
    problem = error.problems[0]
    return AgentError(
        prefix + problem.message,
        key=problem.key,
        hint=problem.hint,
        kind=error.kind,
        trace=error.trace,
    )

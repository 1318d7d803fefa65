"""Runner of a cell's tickets: their groups of episodes, and the reports of how they ended."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import (
    AgentError,
    ArealError,
    ClusterError,
    HttpStatusError,
    PersistentNodeShortageError,
    RecipeError,
    escape_surrogates,
)
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.recipe.sections.rollout import RolloutConfig, SamplingConfig
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.driver import LeasedTickets, ReplicaGate, ServiceClients
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
from areal_hpc.rollout.episodes.group import GroupFilter, run_group_until_enough_succeed
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.spans import time_span
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    EvaluationResultRequest,
    TicketGrant,
    TicketRef,
)
from areal_hpc.wire.proxy import (
    MAX_CAUSE_CHARS,
    MAX_ERROR_CHARS,
    FinishTicketReply,
    FinishTicketRequest,
    KeepFailedSessionReply,
    KeepFailedSessionRequest,
    SamplingDefaults,
)
from areal_hpc.wire.retry import Backoff

log = logging.getLogger(__name__)

RETRY_BACKOFF = Backoff(0.25, 10.0)
"""An agent that fails because of an outage must not use up its tries in a moment."""
TRAIN = "train"
"""The task set of training tickets; those of evaluation sets have their names."""
AGENT_FAULT_EPISODE_STATUSES = ("failed", "timed_out")
"""Ends of an episode that use up one of its tries."""
SHORTAGE_PAUSE_S = 15.0
"""Before an episode for which the node lacked something is tried again."""
MAX_SHORTAGE_S = 300.0
"""A node that has lacked something for so long is no longer taken for loaded. Well below
`RestartPolicy.healthy_s`: a driver that got no further than this has made no progress."""
HELD_OUT_SHORTAGE_FACTOR = 3
"""So many times as long for a held-out task: it scores 0 then, which may say nothing of the model
that is judged."""


class TicketRunner:
    """Runs the tickets of one cell, any number of them at once.

    Agents and tasks are those of `train` and of every evaluation set, by name. An agent is None
    where programs elsewhere play the episodes. `tickets` are told of every episode
    and ticket that ends.

    Raises:
        RecipeError: A function that the recipe names cannot be imported.
    """

    def __init__(
        self,
        cell: str,
        rollout: RolloutConfig,
        evaluation_sets: Sequence[EvaluationSet],
        *,
        agents: Mapping[str, Agent | None],
        tasks: Mapping[str, TaskSet],
        tickets: LeasedTickets,
        services: ServiceClients,
        http_client: Any,
        events: EventLog,
        gate: ReplicaGate,
        episode_watch: EpisodeWatch,
        sandboxes: AgentSandboxes | None = None,
    ) -> None:
        self._cell, self._rollout = cell, rollout
        sampling: dict[str, SamplingConfig] = {TRAIN: rollout.sampling}
        sampling |= {one.name: one.sampling for one in evaluation_sets}
        self._sampling = {
            name: SamplingDefaults(**one.model_dump()) for name, one in sampling.items()
        }
        self._set_names = {one.number: one.name for one in evaluation_sets}
        self._agents, self._tasks, self._tickets = agents, tasks, tickets
        self._acceptance = GroupFilter(rollout)
        self._auxiliary = load_auxiliary_rule(rollout.agent.auxiliary)
        self._ledger, self._proxy = services.ledger, services.proxy
        self._http_client, self._events = http_client, events
        self._gate, self._watch, self._sandboxes = gate, episode_watch, sandboxes
        self._played_at = float("-inf")
        """When an episode last ended that the node had all for."""
        self._short_tickets: set[TicketRef] = set()
        """Those of episodes whose last try met a shortage of the node."""

    async def run(self, ticket_grant: TicketGrant) -> None:
        """Run a ticket until it is finished, evaluated, filtered or dropped."""
        is_finished = False
        try:
            if ticket_grant.ref.eval_step >= 0:
                await self._run_evaluation_ticket(ticket_grant)
            else:
                is_finished = await self._run_and_finish_training_ticket(ticket_grant)
        except (AgentError, RecipeError) as error:
            await self._drop_ticket(ticket_grant, error)
        self._short_tickets.discard(ticket_grant.ref)
        if is_finished:
            self._tickets.mark_finished(ticket_grant.ref)
        else:
            self._tickets.stop_holding(ticket_grant.ref)

    async def _run_evaluation_ticket(self, ticket_grant: TicketGrant) -> None:
        """Run all samples of a held-out task; those that kept failing earn 0.

        Raises:
            AgentError: Every sample kept failing.
            RecipeError: The ledger knows a set that this driver does not.
        """
        number, _ = split_ticket_id(ticket_grant.ref.ticket_id)
        if number not in self._set_names:
            raise RecipeError(
                f"{ticket_grant.ref} is of evaluation set {number}, which is not known here"
            )
        outcomes = await self._run_group(ticket_grant, self._set_names[number])
        try:
            sessions = [one.session_id for one in outcomes]
            await self._keep_sessions_and_close_others(ticket_grant.ref, sessions)
        except HttpStatusError as refusal:  # it restarted and lost them
            log.warning("the episodes of %s are not kept: %s", ticket_grant.ref, refusal)
        n_failed = ticket_grant.n_episodes - len(outcomes)
        rewards = [one.reward for one in outcomes] + [0.0] * n_failed
        answers = [one.answer for one in outcomes] + [""] * n_failed
        result = EvaluationResultRequest(
            self._cell, ticket_grant.ref, rewards, answers if any(answers) else []
        )
        await self._report_to_ledger("/report_evaluation", result)

    async def _run_and_finish_training_ticket(self, ticket_grant: TicketGrant) -> bool:
        """Run a training ticket and have the proxy take it into its journal.

        False if its group was not accepted: then the proxy and the ledger forget it.
        """
        while True:
            incarnation = self._proxy.peer_started_at
            outcomes = await self._run_group(ticket_grant, TRAIN)
            last_error = outcomes[-1].error
            if len(outcomes) > 1 and last_error and all(one.has_failure_reward for one in outcomes):
                raise _prefix_error_message(
                    last_error,
                    f"all {len(outcomes)} episodes of task {ticket_grant.task_index} failed; "
                    "last error: ",
                )
            task = self._tasks[TRAIN][ticket_grant.task_index]
            rewards = [one.reward for one in outcomes]
            rejection_reason = self._acceptance.get_rejection_reason(task, rewards)
            try:
                await self._keep_sessions_and_close_others(
                    ticket_grant.ref,
                    [] if rejection_reason else [one.session_id for one in outcomes],
                )
            except HttpStatusError as refusal:
                if self._proxy.peer_started_at == incarnation:
                    raise AgentError(f"the proxy refused the ticket: {refusal}") from refusal
                log.warning(
                    "the proxy restarted and lost %s; its episodes run again", ticket_grant.ref
                )
                continue
            if rejection_reason:
                self._record_ticket_event("group_filtered", ticket_grant, rejection_reason)
                drop = DropTicketRequest(
                    self._cell, ticket_grant.ref, rejection_reason, "filtered", rewards
                )
                await self._report_to_ledger("/drop", drop)
            return not rejection_reason

    async def _drop_ticket(self, ticket_grant: TicketGrant, error: ArealError) -> None:
        trace, cause = "", str(error)
        if isinstance(error, AgentError):
            trace, cause = error.trace, error.cause
        is_node_short = isinstance(error, PersistentNodeShortageError)
        reason = escape_surrogates("\n".join(filter(None, (str(error), trace))))
        self._record_ticket_event("ticket_dropped", ticket_grant, reason)
        log.error("dropped %s: %s", ticket_grant.ref, reason)
        drop = DropTicketRequest(
            self._cell,
            ticket_grant.ref,
            reason,
            cause="" if is_node_short else cause,
            is_node_short=is_node_short,
        )
        await self._report_to_ledger("/drop", drop)
        try:  # threads of a cancelled agent may still ask in its sessions
            await self._keep_sessions_and_close_others(ticket_grant.ref, [])
        except HttpStatusError as refusal:
            log.warning("could not discard the sessions of %s: %s", ticket_grant.ref, refusal)

    async def _run_group(self, ticket_grant: TicketGrant, set_name: str) -> list[EpisodeOutcome]:
        self._tickets.mark_all_episodes_begun(ticket_grant)
        wanted, least = ticket_grant.n_episodes, 1
        if set_name == TRAIN:
            wanted, least = self._rollout.n_samples, self._rollout.min_group_size
        episodes = [
            self._run_episode_until_decided(ticket_grant, set_name, at)
            for at in range(ticket_grant.n_episodes)
        ]
        outcomes, failed = await run_group_until_enough_succeed(episodes, wanted, least)
        if surplus := len(episodes) - len(outcomes) - len(failed):
            reason = "cancelled: enough episodes of the group are complete"
            self._record_ticket_event("episodes_cancelled", ticket_grant, reason, count=surplus)
        if failed:
            self._record_ticket_event(
                "group_incomplete", ticket_grant, str(failed[-1]), count=len(failed)
            )
        return outcomes

    async def _run_episode_until_decided(
        self, ticket_grant: TicketGrant, set_name: str, episode: int
    ) -> EpisodeOutcome:
        """Repeat one episode until it ends well, or as the recipe has failed ones end."""
        tries = self._rollout.tries_per_episode
        if set_name != TRAIN:
            tries = self._rollout.max_episode_tries
        failures, short_since_s = 0, float("inf")
        try:
            while True:
                await self._gate.wait_until_open()
                spec = self._build_episode_spec(ticket_grant, set_name, episode, failures)
                outcome = await self._play_once(ticket_grant, set_name, spec)
                if outcome.is_node_short:
                    short_since_s = min(short_since_s, time.monotonic())
                    self._raise_if_short_for_long(ticket_grant.ref, outcome, short_since_s)
                    await asyncio.sleep(SHORTAGE_PAUSE_S)
                    continue
                self._played_at, short_since_s = time.monotonic(), float("inf")
                self._short_tickets.discard(ticket_grant.ref)
                if outcome.status == "ok" or outcome.has_failure_reward:
                    return outcome
                if outcome.status == "unserved":
                    self._gate.close_until_replica_serves()
                if outcome.status not in AGENT_FAULT_EPISODE_STATUSES or outcome.error is None:
                    await asyncio.sleep(RETRY_BACKOFF.min_s)
                    continue
                await self._seal_failed_episode(outcome)
                failures += 1
                if failures == tries:
                    times = "once" if tries == 1 else f"{tries} times"
                    raise _prefix_error_message(
                        outcome.error,
                        f"episode {episode} of task {ticket_grant.task_index} failed {times}; "
                        "last error: ",
                    )
                await asyncio.sleep(RETRY_BACKOFF.get_pause_s(failures))
        finally:
            self._tickets.mark_episode_ended(ticket_grant.ref)

    def _raise_if_short_for_long(
        self, ref: TicketRef, outcome: EpisodeOutcome, since_s: float
    ) -> None:
        """Decide about an episode that the node has lacked something for since `since_s`.

        Training waits for the last held-out tasks of an evaluation, so nothing may be tried beside
        them: that one such task alone is short says nothing of the node.

        Raises:
            ClusterError: For long no episode could be played, and none is being played.
            PersistentNodeShortageError: This one could not be played. Its ticket ends.
        """
        self._short_tickets.add(ref)
        is_held_out = ref.eval_step >= 0
        limit_s = MAX_SHORTAGE_S * (HELD_OUT_SHORTAGE_FACTOR if is_held_out else 1)
        if time.monotonic() - since_s < limit_s:
            return
        why = f"could be played for {limit_s:g} s, the last time because of: {outcome.reason}"
        if self._played_at >= since_s:
            raise PersistentNodeShortageError(f"others, but not this episode, {why}")
        if is_held_out and self._short_tickets == {ref}:
            raise PersistentNodeShortageError(f"nothing else is left, and this episode never {why}")
        # An episode may take hours. One that runs for that long has what it needs, and what it
        # leaves at its end may be all that this one lacks.
        if self._watch.oldest_running_age_s <= MAX_SHORTAGE_S:
            raise ClusterError(f"no episode {why}")

    async def _play_once(
        self, ticket_grant: TicketGrant, set_name: str, spec: EpisodeSpec
    ) -> EpisodeOutcome:
        agent, episode = self._agents[set_name], spec.session.episode
        facts = {**_build_ticket_facts(ticket_grant), "episode": episode}
        with time_span("episode", "episodes", **facts) as found:
            if agent is None:
                outcome = await offer_episode_to_external_program(spec, self._proxy)
                took_s = 0.0
            else:
                name, watched = spec.session.task_id, facts | {"limit_s": spec.timeout_s}
                with self._watch.follow_episode(name, watched) as running:
                    outcome = await run_episode(
                        spec, agent, self._proxy, self._http_client, self._sandboxes
                    )
                took_s = running.age_s
            found["status"] = outcome.status
        if outcome.status == "ok":
            self._watch.record_good_end(took_s)
        else:
            self._record_unsuccessful_episode(ticket_grant, set_name, episode, outcome)
        return outcome

    def _record_unsuccessful_episode(
        self, ticket_grant: TicketGrant, set_name: str, episode: int, outcome: EpisodeOutcome
    ) -> None:
        facts: dict[str, Any] = {"episode": episode}
        if outcome.error is not None and outcome.status in AGENT_FAULT_EPISODE_STATUSES:
            self._watch.record_failed_end()
            facts |= outcome.describe_fault()
            facts |= {"failed": self._watch.failed, "ended": self._watch.ended}
            if outcome.has_failure_reward:
                facts |= {"reward": outcome.reward, "then": f"it earns {outcome.reward:g}"}
            elif set_name == TRAIN and self._rollout.failed_episodes == "drop":
                facts["then"] = "it is left out"
        self._record_ticket_event(
            f"episode_{outcome.status}", ticket_grant, outcome.reason, **facts
        )

    async def _seal_failed_episode(self, outcome: EpisodeOutcome) -> None:
        cause = outcome.status if outcome.error is None else outcome.error.cause
        request = KeepFailedSessionRequest(
            outcome.session_id, cause[:MAX_CAUSE_CHARS], outcome.reason[:MAX_ERROR_CHARS]
        )
        try:
            await self._proxy.call_until_answered(
                "/rl/keep_failed", request, KeepFailedSessionReply
            )
        except HttpStatusError as refusal:  # it restarted and lost the session
            log.warning("the failed episode %s is not kept: %s", outcome.session_id, refusal)

    def _build_episode_spec(
        self, ticket_grant: TicketGrant, set_name: str, episode: int, failures: int
    ) -> EpisodeSpec:
        ref, is_training = ticket_grant.ref, set_name == TRAIN
        return build_episode_spec(
            self._rollout,
            self._agents[set_name],
            self._tasks[set_name][ticket_grant.task_index],
            f"{set_name}-{ref.ticket_id}-{ref.attempt}-{episode}",
            sampling=self._sampling[set_name],
            seed=derive_episode_seed(ticket_grant.seed, episode, failures),
            auxiliary=self._auxiliary,
            failure_reward=self._rollout.failure_reward if is_training else None,
            records_sampling_mask=self._rollout.record_sampling_mask and is_training,
            ref=ref,
            episode=episode,
            task_index=ticket_grant.task_index,
        )

    async def _keep_sessions_and_close_others(self, ref: TicketRef, sessions: list[str]) -> None:
        request = FinishTicketRequest(ref, sessions, discard=not sessions)
        await self._proxy.call_until_answered("/rl/finish_ticket", request, FinishTicketReply)

    async def _report_to_ledger(
        self, route: str, request: DropTicketRequest | EvaluationResultRequest
    ) -> None:
        try:
            await self._ledger.call_until_answered(route, request, Acknowledged)
        except HttpStatusError as refusal:  # it was re-issued elsewhere meanwhile
            log.warning("the ledger no longer accepts a report on %s: %s", request.ref, refusal)

    def _record_ticket_event(
        self, event: str, ticket_grant: TicketGrant, reason: str, **event_fields: Any
    ) -> None:
        self._events.record(
            event, **_build_ticket_facts(ticket_grant), **event_fields, reason=reason
        )


def _build_ticket_facts(ticket_grant: TicketGrant) -> dict[str, Any]:
    return {**msgspec.structs.asdict(ticket_grant.ref), "task": ticket_grant.task_index}


def _prefix_error_message(error: AgentError, beginning: str) -> AgentError:
    problem = error.problems[0]
    return AgentError(
        beginning + problem.message,
        key=problem.key,
        hint=problem.hint,
        kind=error.kind,
        trace=error.trace,
    )

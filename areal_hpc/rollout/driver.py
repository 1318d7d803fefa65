"""Driver of a cell: leases tickets from the ledger and runs them until the run is over."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from areal_hpc.errors import (
    AgentError,
    ArealError,
    HttpStatusError,
    NodeResourceShortageError,
    RecipeError,
    escape_surrogates,
)
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.recipe.sections.rollout import RolloutConfig
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
from areal_hpc.rollout.episodes.group import load_group_filter, run_group
from areal_hpc.rollout.execution.agent_sandboxes import AgentSandboxes
from areal_hpc.rollout.task_set import TaskSet
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.rundir.telemetry.spans import record_state_entry, time_span
from areal_hpc.wire.ledger import (
    Acknowledged,
    DropTicketRequest,
    Empty,
    EvaluationResultRequest,
    LeaseReply,
    LeaseRequest,
    TaskSplit,
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
    ProxyHealth,
    SamplingDefaults,
    SealTicketsReply,
)
from areal_hpc.wire.retry import Backoff

log = logging.getLogger(__name__)

TRAIN = "train"
"""The task set of training tickets; those of evaluation sets have their names."""
IDLE_LEASE_LONG_POLL_S = 2.0
"""How long the ledger may keep the request of a driver that has nothing to do."""
IDLE_LEASE_PAUSE_S = 0.05
LEASE_REQUEST_TIMEOUT_S = 5.0
SEAL_TIMEOUT_S = 300.0
FAILED_SEAL_PAUSE_S = 2.0
CLOSED_GATE_POLL_S = 0.25
"""Between two questions to the proxy while no replica serves. An open gate asks nothing."""
RETRY_BACKOFF = Backoff(0.25, 10.0)
"""An agent that fails because of an outage must not use up its tries in a moment."""
AGENT_FAULT_EPISODE_STATUSES = ("failed", "timed_out")
"""Ends of an episode that use up one of its tries."""
SHORTAGE_PAUSE_S = 15.0
"""Before an episode for which the node lacked something is tried again."""
MAX_SHORTAGE_S = 900.0
"""A ticket is dropped if the node lacks something for one of its episodes for so long."""


class LeasedTickets:
    """Tickets leased by a driver, and its free capacity.

    A cell with fewer slots than a training ticket has episodes could never start one, and gets as
    many.
    """

    def __init__(self, episode_slots: int, episodes_per_ticket: int) -> None:
        self._slots = max(episode_slots, episodes_per_ticket)
        self._episodes_per_ticket = episodes_per_ticket
        self.changed = asyncio.Event()
        """Set when a ticket ends, or there is room for a further one."""
        self._open_episodes: dict[TicketRef, int] = {}
        self._begun_episodes: dict[TicketRef, int] = {}
        self._finished: dict[TicketRef, None] = {}  # in order

    @property
    def free_episode_slots(self) -> int:
        return max(0, self._slots - sum(self._open_episodes.values()))

    @property
    def has_no_open_episodes(self) -> bool:
        return not any(self._open_episodes.values())

    @property
    def ended_episodes_of_open_tickets(self) -> int:
        """Episodes that are over, of training tickets that are not."""
        return sum(
            begun - self._open_episodes[ref]
            for ref, begun in self._begun_episodes.items()
            if ref.eval_step < 0
        )

    @property
    def held(self) -> list[TicketRef]:
        return list(self._open_episodes)

    @property
    def finished(self) -> list[TicketRef]:
        """Training tickets that ended and, as far as is known here, are not settled.

        Reported until the ledger says otherwise: one that restarted knows nothing of them.
        """
        return list(self._finished)

    def hold(self, grant: TicketGrant) -> bool:
        """Hold a granted ticket. False if it is here already (the grant was repeated)."""
        if grant.ref in self._open_episodes or grant.ref in self._finished:
            return False
        self.begin_episodes(grant)
        return True

    def begin_episodes(self, grant: TicketGrant) -> None:
        self._open_episodes[grant.ref] = self._begun_episodes[grant.ref] = grant.n_episodes

    def end_episode(self, ref: TicketRef) -> None:
        self._open_episodes[ref] -= 1
        if self.free_episode_slots >= self._episodes_per_ticket:
            self.changed.set()

    def release(self, ref: TicketRef, *, is_finished: bool) -> None:
        """Hold a ticket no longer; a finished one is reported until the ledger has settled it."""
        del self._open_episodes[ref], self._begun_episodes[ref]
        if is_finished:
            self._finished[ref] = None
        self.changed.set()

    def forget_finished(self, refs: Iterable[TicketRef]) -> None:
        for ref in refs:
            self._finished.pop(ref, None)


class ReplicaGate:
    """Holds a cell's episodes back while none of its replicas serves.

    Closed until the proxy says that one does, and again when an episode found none. `on_open` is
    called each time it opens.
    """

    def __init__(self, proxy: AsyncServiceClient, on_open: Callable[[], None]) -> None:
        self._proxy, self._on_open = proxy, on_open
        self._opened, self._closed = asyncio.Event(), asyncio.Event()
        self._closed.set()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        self._opened.clear()
        self._closed.set()

    async def wait_for_replica(self) -> None:
        await self._opened.wait()

    async def run(self) -> None:
        """Ask the proxy whenever the gate is closed, until cancelled."""
        while True:
            await self._closed.wait()
            health = await self._proxy.call_repeatedly("/healthz", None, ProxyHealth)
            if health.replicas_serving:
                self._closed.clear()
                self._opened.set()
                self._on_open()
            else:
                await asyncio.sleep(CLOSED_GATE_POLL_S)


class Driver:
    """Keeps the episode slots of one cell busy until the ledger says stop.

    One lease request is under way at a time, so that the ledger can take `held` and `finished`
    for the truth. A driver with work under way asks briefly and waits here, where it hears
    at once of a ticket that ended; an idle one lets the ledger keep its request. Nothing is leased
    while no replica of the cell serves.

    Agents and tasks are those of `train` and of every evaluation set, by name. An agent is None
    where programs elsewhere play the episodes.

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
        episode_slots: int,
        ledger: AsyncServiceClient,
        proxy: AsyncServiceClient,
        http_client: Any,
        events: EventLog,
        splits: tuple[TaskSplit, ...] = ("train", "valid"),
        job_start: int = 0,
        sandboxes: AgentSandboxes | None = None,
    ) -> None:
        self._cell, self._rollout, self._splits = cell, rollout, splits
        self._agents, self._tasks, self._job_start = agents, tasks, job_start
        self._ledger, self._proxy, self._http_client = ledger, proxy, http_client
        self._events, self._sandboxes = events, sandboxes
        sampling = {one.name: one.sampling for one in evaluation_sets}
        self._sampling = {
            name: SamplingDefaults(**one.model_dump())
            for name, one in {TRAIN: rollout.sampling, **sampling}.items()
        }
        self._set_names = {one.number: one.name for one in evaluation_sets}
        self._find_rejection = load_group_filter(rollout)
        self._auxiliary = load_auxiliary_rule(rollout.agent.auxiliary)
        self.tickets = LeasedTickets(episode_slots, rollout.episodes_per_ticket)
        self.watch = EpisodeWatch(events)
        self._gate = ReplicaGate(proxy, self.tickets.changed.set)
        self._seal: asyncio.Task[None] | None = None

    # Leases ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Lease tickets and start them until told to stop. Cancelling it cancels every episode."""
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(one.run()) for one in (self._gate, self.watch)]
            under_way = set[asyncio.Task[None]]()
            while not (reply := await self._request_lease()).stop:
                self.tickets.forget_finished(reply.over)
                for grant in reply.grants:
                    if self.tickets.hold(grant):
                        under_way.add(task := group.create_task(self._run_ticket(grant)))
                        task.add_done_callback(under_way.discard)
                self._record_activity()
                if reply.seal_now and not self._is_sealing:
                    self._seal = group.create_task(self._request_seal())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(
                        reply.pause_s if self._is_busy else IDLE_LEASE_PAUSE_S
                    ):
                        await self.tickets.changed.wait()
                self._record_activity()
            for task in (*watching, *under_way, *([self._seal] if self._seal else [])):
                task.cancel()

    def is_idle_without_ledger(self, for_s: float) -> bool:
        return self.tickets.has_no_open_episodes and self._ledger.silent_s >= for_s

    def _record_activity(self) -> None:
        if not self.tickets.has_no_open_episodes:
            record_state_entry("episodes")
        else:
            record_state_entry("idle" if self._gate.is_open else "no replica")

    @property
    def _is_sealing(self) -> bool:
        return self._seal is not None and not self._seal.done()

    @property
    def _is_busy(self) -> bool:
        return bool(self.tickets.held) or self._is_sealing or not self._gate.is_open

    async def _request_lease(self) -> LeaseReply:
        self.tickets.changed.clear()
        request = LeaseRequest(
            cell=self._cell,
            capacity=self.tickets.free_episode_slots if self._gate.is_open else 0,
            held=self.tickets.held,
            finished=self.tickets.finished,
            wait_s=0.0 if self._is_busy else IDLE_LEASE_LONG_POLL_S,
            job_start=self._job_start,
            splits=self._splits,
            ended_episodes=self.tickets.ended_episodes_of_open_tickets,
            slowest_episode_s=self.watch.oldest_running_age_s,
        )
        return await self._ledger.call_repeatedly(
            "/lease", request, LeaseReply, timeout_s=LEASE_REQUEST_TIMEOUT_S + request.wait_s
        )

    async def _request_seal(self) -> None:
        finished = self.tickets.finished
        try:
            await self._proxy.call_repeatedly(
                "/rl/seal", Empty(), SealTicketsReply, timeout_s=SEAL_TIMEOUT_S
            )
            # Settled, or lost with the proxy's journal: then the ledger must issue them again.
            self.tickets.forget_finished(finished)
        except HttpStatusError as refusal:
            log.error("the proxy could not seal a shard: %s", refusal)
            await asyncio.sleep(FAILED_SEAL_PAUSE_S)  # the ledger will ask again at once
        self.tickets.changed.set()

    # Tickets ---------------------------------------------------------------------------------

    async def _run_ticket(self, grant: TicketGrant) -> None:
        """Run a ticket until it is finished, evaluated, filtered or dropped."""
        is_finished = False
        try:
            if grant.ref.eval_step >= 0:
                await self._run_evaluation_ticket(grant)
            else:
                is_finished = await self._run_training_ticket(grant)
        except (AgentError, RecipeError, NodeResourceShortageError) as error:
            await self._drop_ticket(grant, error)
        self.tickets.release(grant.ref, is_finished=is_finished)

    async def _run_evaluation_ticket(self, grant: TicketGrant) -> None:
        """Run all samples of a held-out task; those that kept failing earn 0."""
        number, _ = split_ticket_id(grant.ref.ticket_id)
        if number not in self._set_names:
            raise RecipeError(f"{grant.ref} is of evaluation set {number}, which is not known here")
        outcomes = await self._run_group(grant, self._set_names[number])
        try:
            await self._finish_sessions(grant.ref, [one.session_id for one in outcomes])
        except HttpStatusError as refusal:  # it restarted and lost them
            log.warning("the episodes of %s are not kept: %s", grant.ref, refusal)
        n_failed = grant.n_episodes - len(outcomes)
        rewards = [one.reward for one in outcomes] + [0.0] * n_failed
        answers = [one.answer for one in outcomes] + [""] * n_failed
        result = EvaluationResultRequest(
            self._cell, grant.ref, rewards, answers if any(answers) else []
        )
        await self._report_to_ledger("/report_evaluation", result)

    async def _run_training_ticket(self, grant: TicketGrant) -> bool:
        """Run a training ticket and have the proxy take it into its journal.

        False if its group was not accepted: then the proxy and the ledger forget it.
        """
        while True:
            incarnation = self._proxy.peer_started_at
            outcomes = await self._run_group(grant, TRAIN)
            last_error = outcomes[-1].error
            if len(outcomes) > 1 and last_error and all(one.has_failure_reward for one in outcomes):
                raise _prefix_error_message(
                    last_error,
                    f"all {len(outcomes)} episodes of task {grant.task_index} failed; last error: ",
                )
            rewards = [one.reward for one in outcomes]
            rejection = self._find_rejection(self._tasks[TRAIN][grant.task_index], rewards)
            kept = [] if rejection else [one.session_id for one in outcomes]
            try:
                await self._finish_sessions(grant.ref, kept)
            except HttpStatusError as refusal:
                if self._proxy.peer_started_at == incarnation:
                    raise AgentError(f"the proxy refused the ticket: {refusal}") from refusal
                log.warning("the proxy restarted and lost %s; its episodes run again", grant.ref)
                continue
            if rejection:
                self._record("group_filtered", grant, rejection)
                drop = DropTicketRequest(self._cell, grant.ref, rejection, "filtered", rewards)
                await self._report_to_ledger("/drop", drop)
            return not rejection

    async def _drop_ticket(self, grant: TicketGrant, error: ArealError) -> None:
        trace, cause = "", str(error)
        if isinstance(error, AgentError):
            trace, cause = error.trace, error.cause
        elif isinstance(error, NodeResourceShortageError):
            cause = ""  # no fault of the agent
        reason = escape_surrogates("\n".join(filter(None, (str(error), trace))))
        self._record("ticket_dropped", grant, reason)
        log.error("dropped %s: %s", grant.ref, reason)
        drop = DropTicketRequest(self._cell, grant.ref, reason, cause=cause)
        await self._report_to_ledger("/drop", drop)
        try:  # threads of a cancelled agent may still ask in its sessions
            await self._finish_sessions(grant.ref, [])
        except HttpStatusError as refusal:
            log.warning("could not discard the sessions of %s: %s", grant.ref, refusal)

    async def _run_group(self, grant: TicketGrant, set_name: str) -> list[EpisodeOutcome]:
        self.tickets.begin_episodes(grant)
        wanted, least = grant.n_episodes, 1
        if set_name == TRAIN:
            wanted, least = self._rollout.n_samples, self._rollout.min_group_size
        episodes = [self._run_episode(grant, set_name, at) for at in range(grant.n_episodes)]
        outcomes, failed = await run_group(episodes, wanted, least)
        if surplus := len(episodes) - len(outcomes) - len(failed):
            reason = "cancelled: enough episodes of the group are complete"
            self._record("episodes_cancelled", grant, reason, count=surplus)
        if failed:
            self._record("group_incomplete", grant, str(failed[-1]), count=len(failed))
        return outcomes

    async def _finish_sessions(self, ref: TicketRef, kept: list[str]) -> None:
        """Have the proxy keep these sessions of a ticket for its shards, and close the others."""
        request = FinishTicketRequest(ref, kept, discard=not kept)
        await self._proxy.call_repeatedly("/rl/finish_ticket", request, FinishTicketReply)

    async def _report_to_ledger(
        self, route: str, request: DropTicketRequest | EvaluationResultRequest
    ) -> None:
        try:
            await self._ledger.call_repeatedly(route, request, Acknowledged)
        except HttpStatusError as refusal:  # it was re-issued elsewhere meanwhile
            log.warning("the ledger no longer accepts a report on %s: %s", request.ref, refusal)

    def _record(self, event: str, grant: TicketGrant, reason: str, **event_fields: Any) -> None:
        self._events.record(event, **_build_ticket_facts(grant), **event_fields, reason=reason)

    # Episodes --------------------------------------------------------------------------------

    async def _run_episode(self, grant: TicketGrant, set_name: str, episode: int) -> EpisodeOutcome:
        """Repeat one episode until it ends well, or as the recipe has failed ones end."""
        is_training = set_name == TRAIN
        tries = self._rollout.tries_per_episode if is_training else self._rollout.max_episode_tries
        failures, short_since_s = 0, float("inf")
        try:
            while True:
                await self._gate.wait_for_replica()
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
                    self._gate.close()
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
            self.tickets.end_episode(grant.ref)

    def _build_episode_spec(
        self, grant: TicketGrant, set_name: str, episode: int, failures: int
    ) -> EpisodeSpec:
        ref, is_training = grant.ref, set_name == TRAIN
        return build_episode_spec(
            self._rollout,
            self._agents[set_name],
            self._tasks[set_name][grant.task_index],
            f"{set_name}-{ref.ticket_id}-{ref.attempt}-{episode}",
            sampling=self._sampling[set_name],
            seed=derive_episode_seed(grant.seed, episode, failures),
            auxiliary=self._auxiliary,
            failure_reward=self._rollout.failure_reward if is_training else None,
            records_sampling_mask=self._rollout.record_sampling_mask and is_training,
            ref=ref,
            episode=episode,
            task_index=grant.task_index,
        )

    async def _play_once(
        self, grant: TicketGrant, set_name: str, spec: EpisodeSpec
    ) -> EpisodeOutcome:
        agent, episode = self._agents[set_name], spec.session.episode
        facts = {**_build_ticket_facts(grant), "episode": episode}
        with time_span("episode", "episodes", **facts) as found:
            if agent is None:
                outcome = await offer_episode_to_external_program(spec, self._proxy)
                took_s = 0.0
            else:
                name, watched = spec.session.task_id, facts | {"limit_s": spec.timeout_s}
                with self.watch.follow_episode(name, watched) as running:
                    outcome = await run_episode(
                        spec, agent, self._proxy, self._http_client, self._sandboxes
                    )
                took_s = running.age_s
            found["status"] = outcome.status
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
        except HttpStatusError as refusal:  # it restarted and lost the session
            log.warning("the failed episode %s is not kept: %s", outcome.session_id, refusal)


def _build_ticket_facts(grant: TicketGrant) -> dict[str, Any]:
    return {**msgspec.structs.asdict(grant.ref), "task": grant.task_index}


def _prefix_error_message(error: AgentError, beginning: str) -> AgentError:
    problem = error.problems[0]
    return AgentError(
        beginning + problem.message,
        key=problem.key,
        hint=problem.hint,
        kind=error.kind,
        trace=error.trace,
    )

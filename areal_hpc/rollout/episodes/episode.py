"""One episode: open a session, run the agent or wait for a program, record rewards."""

import asyncio
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from areal_hpc.errors import (
    AgentError,
    HttpStatusError,
    InvalidRewardError,
    NodeResourceShortageError,
    Problem,
    escape_surrogates,
)
from areal_hpc.rollout.agent import Agent
from areal_hpc.rollout.episodes.auxiliary import mark_auxiliary_conversations
from areal_hpc.rollout.episodes.episode_spec import EpisodeSpec
from areal_hpc.rollout.execution.agent_errors import (
    build_agent_error,
    find_agent_run_definition,
    find_node_shortage,
    find_waiting_line,
    format_missing_column_hint,
)
from areal_hpc.rollout.execution.agent_sandboxes import (
    AgentSandboxes,
    EpisodeSandbox,
    acquire_sandbox,
)
from areal_hpc.rollout.execution.subprocess_agent import acquire_episode_agent
from areal_hpc.rundir.service_client import AsyncServiceClient
from areal_hpc.session.credit import parse_reward
from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import Empty
from areal_hpc.wire.proxy import (
    AwaitSessionEndReply,
    AwaitSessionEndRequest,
    EndSessionReply,
    OfferEpisodeReply,
    OfferEpisodeRequest,
    SetRewardReply,
    SetRewardRequest,
    StartSessionReply,
)

ReplyT = TypeVar("ReplyT")

CANCEL_GRACE_S = 1.0
"""Time for a cancelled agent to clean up, after which the episode ends without it."""
PROXY_LONG_POLL_S = 10.0
"""Time for which the proxy may hold a request that waits for a program."""

TIMED_OUT_KIND = "TimedOut"
BAD_REWARD_KIND = "BadReward"
REFUSED_REWARD_KIND = "RefusedReward"
NO_CALL_KIND = "NoModelCall"
"""Kinds of agents' errors without an exception of the agent."""
_NO_ENDPOINT_TEXTS = (
    "Missing credentials",  # openai
    "api_key client option",  # openai before 2.0
    "resolve authentication method",  # anthropic
    "Connect call failed",
    "Connection refused",
    "connection attempts failed",
)
"""Parts of the messages of clients that lack a key, or call where no server listens."""
_POSSIBLE_SHORTAGE_EXCEPTIONS = (NodeResourceShortageError, OSError, RuntimeError)
"""Exceptions that may be due to a shortage of the node; `find_node_shortage` decides."""

EpisodeStatus = Literal["ok", "failed", "timed_out", "interrupted", "unserved"]


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    status: EpisodeStatus
    """End of the episode; the last two are not the agent's fault. `interrupted`: the proxy
    restarted and lost the session, a program ended it without a reward, or the node lacked
    something; `unserved`: it failed while no replica of the cell served."""
    session_id: str
    """Session of the episode; empty if a sandbox or a process was missing before it was opened."""
    reward: float = 0.0
    """Reward of the episode, if `ok` or `has_failure_reward`."""
    has_failure_reward: bool = False
    """Whether its agent failed, and its last interaction has the reward of a failed episode."""
    answer: str = ""
    """Final answer by the agent's last `Reward` that has one."""
    reason: str = ""
    """Reason why it is not `ok`: one sentence, then the end of the traceback if there is one."""
    error: AgentError | None = None
    """Error of the agent, unless it is `ok` or `interrupted` by a program or the node."""
    is_node_short: bool = False
    """Whether it was `interrupted` by a shortage of the node, so that an early retry would fail."""

    def describe_fault(self) -> dict[str, str]:
        """Build the event fields about the error."""
        problem = self.error.problems[0] if self.error else Problem("")
        return {
            "kind": self.error.kind if self.error else self.status,
            "message": problem.message,
            "at": problem.key,
            "hint": problem.hint,
        }


async def run_episode(
    spec: EpisodeSpec,
    agent: Agent,
    proxy: AsyncServiceClient,
    http_client: Any,
    sandboxes: AgentSandboxes | None = None,
) -> EpisodeOutcome:
    """Run one episode to its end, and return an outcome after any error of the agent.

    It waits while the proxy restarts, so a restart costs no try. With `sandboxes` the episode gets
    one of them, which is stopped before this returns.

    Raises:
        HttpStatusError: The proxy refused to open a session.
    """
    try:
        async with (
            acquire_episode_agent(agent) as acquired,
            acquire_sandbox(sandboxes, spec.data) as sandbox,
        ):
            return await _play_in_new_session(spec, acquired, proxy, http_client, sandbox)
    # A worker, a sandbox or a thread could not be started.
    except _POSSIBLE_SHORTAGE_EXCEPTIONS as error:
        if (shortage := find_node_shortage(error)) is None:
            raise
        return _build_shortage_outcome(shortage)


def _build_shortage_outcome(
    shortage: NodeResourceShortageError, session_id: str = ""
) -> EpisodeOutcome:
    return EpisodeOutcome("interrupted", session_id, reason=str(shortage), is_node_short=True)


async def _play_in_new_session(
    spec: EpisodeSpec,
    agent: Agent,
    proxy: AsyncServiceClient,
    http_client: Any,
    sandbox: EpisodeSandbox | None,
) -> EpisodeOutcome:
    session = await proxy.call_repeatedly("/rl/start_session", spec.session, StartSessionReply)
    incarnation = proxy.peer_started_at
    try:
        if sandbox is not None:
            lifetime_s = spec.timeout_s + CANCEL_GRACE_S
            await sandbox.hand_to_agent(spec.data, f"{proxy.url}/v1", session.api_key, lifetime_s)
        returned = await _run_agent(spec, session, agent, proxy.url, http_client)
        if sandbox is not None and spec.kept_files_dir is not None:
            await sandbox.keep_files(spec.kept_files_dir / f"{session.session_id}.tar")
        if spec.auxiliary is not None:
            await mark_auxiliary_conversations(spec.auxiliary, session.session_id, proxy)
        rewards = parse_agent_rewards(returned)
        answers = [reward.answer for reward in rewards.values() if reward.answer]
        reward = await _end_session(rewards, session, proxy)
        return EpisodeOutcome(
            "ok", session.session_id, reward=reward, answer=answers[-1] if answers else ""
        )
    # Shortages inside the agent arrive as a NodeResourceShortageError.
    except _POSSIBLE_SHORTAGE_EXCEPTIONS as possible_shortage:
        if (shortage := find_node_shortage(possible_shortage)) is None:
            raise
        await _end_session_of_failed_episode(session, proxy)
        return _build_shortage_outcome(shortage, session.session_id)
    except AgentError as failure:
        is_rewarded = await _reward_failed_episode(spec, failure, session, proxy)
        end_reply = await _end_session_of_failed_episode(session, proxy)
        error = _explain_failure(failure, end_reply, agent, spec.data)
    status: EpisodeStatus = "timed_out" if error.kind == TIMED_OUT_KIND else "failed"
    if end_reply is not None and not end_reply.replicas_serving:
        status = "unserved"
    if proxy.peer_started_at != incarnation:
        status = "interrupted"
    reason = "\n".join(filter(None, (str(error), error.trace)))
    reward = spec.failure_reward if is_rewarded and spec.failure_reward is not None else 0.0
    return EpisodeOutcome(
        status,
        session.session_id,
        reward=reward,
        has_failure_reward=is_rewarded,
        reason=reason,
        error=error,
    )


async def _reward_failed_episode(
    spec: EpisodeSpec, failure: AgentError, session: StartSessionReply, proxy: AsyncServiceClient
) -> bool:
    """Set the reward of a failed episode; return False if it has none, or nothing to train.

    If the proxy refused some of an episode's rewards, the episode keeps the others.
    """
    reward = spec.failure_reward
    if reward is None or failure.kind == REFUSED_REWARD_KIND:
        return False
    try:
        if spec.auxiliary is not None:
            await mark_auxiliary_conversations(spec.auxiliary, session.session_id, proxy)
        await _control_session(
            session, proxy, "/rl/set_reward", SetRewardRequest(reward), SetRewardReply
        )
    except (AgentError, HttpStatusError):  # no reply is complete, or the session is forgotten
        return False
    return True


def _explain_failure(
    failure: AgentError, end_reply: EndSessionReply | None, agent: Agent, data: dict[str, Any]
) -> AgentError:
    problem, kind = failure.problems[0], failure.kind
    message, hint = escape_surrogates(problem.message), problem.hint
    if end_reply is not None and end_reply.interaction_count == 0:
        if kind == REFUSED_REWARD_KIND:
            message = "the agent made no model call, so there is nothing to reward"
            kind = NO_CALL_KIND
        if kind == NO_CALL_KIND or any(sign in message for sign in _NO_ENDPOINT_TEXTS):
            hint = "call the model at the `base_url`, with the `api_key`, that `run` is given"
    if kind == KeyError.__name__:
        hint = format_missing_column_hint(message.partition(f"{kind}: ")[2].strip("'\""), data)
    return AgentError(
        message,
        key=problem.key or find_agent_run_definition(agent),
        hint=hint,
        kind=kind,
        trace=escape_surrogates(failure.trace),
    )


async def offer_episode_to_external_program(
    spec: EpisodeSpec, proxy: AsyncServiceClient
) -> EpisodeOutcome:
    """Offer the episode until a program takes it, then wait until the program ends its session.

    A program that takes longer than `spec.timeout_s`, or ends without a reward, costs no try of the
    ticket: the outcome is `interrupted`.
    """
    offer = OfferEpisodeRequest(spec.session, spec.data, PROXY_LONG_POLL_S)
    session_id = None
    while session_id is None:
        reply = await proxy.call_repeatedly("/rl/offer_episode", offer, OfferEpisodeReply)
        session_id = reply.session_id
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + spec.timeout_s
    reason = f"the program took longer than {spec.timeout_s:g} s"
    while (left_s := give_up_at - clock()) > 0:
        request = AwaitSessionEndRequest(session_id, min(left_s, PROXY_LONG_POLL_S))
        try:
            state = await proxy.call_repeatedly("/rl/await_session", request, AwaitSessionEndReply)
        except HttpStatusError as refusal:
            reason = f"the proxy forgot the session: {refusal}"
            break
        if state.ended and state.reward is not None:
            return EpisodeOutcome("ok", session_id, reward=state.reward)
        if state.ended:
            reason = "the external program ended its session without a reward"
            break
    return EpisodeOutcome("interrupted", session_id, reason=reason)


def parse_agent_rewards(returned: object) -> dict[str | None, Reward]:
    """Parse the agent's result into rewards by interaction id (None: the last interaction)."""
    if not isinstance(returned, dict):
        return {None: _parse_one_agent_reward(returned, "")}
    if not returned:
        raise AgentError(
            "the agent returned an empty dict, expected a reward per interaction id",
            kind=BAD_REWARD_KIND,
        )
    for key in returned:
        if not isinstance(key, str):
            raise AgentError(
                f"the agent returned a dict with the key {key!r}, expected ids (str)",
                kind=BAD_REWARD_KIND,
            )
    return {key: _parse_one_agent_reward(value, f" for {key}") for key, value in returned.items()}


def _parse_one_agent_reward(value: object, location_text: str) -> Reward:
    try:
        return parse_reward(value)
    except InvalidRewardError as refusal:
        raise AgentError(
            f"the agent returned {value!r:.200} ({type(value).__name__}){location_text}, "
            "expected a finite float, or an areal_hpc.Reward",
            kind=BAD_REWARD_KIND,
        ) from refusal


async def _run_agent(
    spec: EpisodeSpec, session: StartSessionReply, agent: Agent, proxy_url: str, http_client: Any
) -> object:
    # A separate task, because an agent that swallows its cancellation must not hold the episode.
    task = asyncio.create_task(
        _call_agent_returning_errors(
            agent,
            spec.data,
            base_url=f"{proxy_url}/v1",
            api_key=session.api_key,
            http_client=http_client,
            session_id=session.session_id,
            seed=spec.session.seed,
        ),
        name=spec.session.task_id,
    )
    line = ""
    try:
        done, _ = await asyncio.wait({task}, timeout=spec.timeout_s)
        line = "" if done else find_waiting_line(task)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
    if not done:
        raise AgentError(f"took longer than {spec.timeout_s:g} s", key=line, kind=TIMED_OUT_KIND)
    if task.cancelled():
        raise AgentError("the agent cancelled itself", kind="CancelledError")
    returned = task.result()
    if isinstance(returned, AgentError | NodeResourceShortageError):
        raise returned
    return returned


async def _call_agent_returning_errors(
    agent: Agent, data: dict[str, Any], **extra_kwargs: Any
) -> object:
    try:
        return await agent.run(data, **extra_kwargs)
    except AgentError as error:  # its message is complete
        return error
    except (Exception, SystemExit) as error:  # boundary: the agent is the user's code
        if (shortage := find_node_shortage(error)) is not None:
            return shortage
        return build_agent_error(error, error.__traceback__ and error.__traceback__.tb_next)


async def _end_session(
    rewards: dict[str | None, Reward], session: StartSessionReply, proxy: AsyncServiceClient
) -> float:
    try:
        for interaction_id, reward in rewards.items():
            request = SetRewardRequest(reward, interaction_id)
            await _control_session(session, proxy, "/rl/set_reward", request, SetRewardReply)
        reply = await _control_session(session, proxy, "/rl/end_session", Empty(), EndSessionReply)
    except HttpStatusError as refusal:
        raise AgentError(
            f"the proxy refused the agent's rewards: {refusal.peer_message}",
            kind=REFUSED_REWARD_KIND,
        ) from refusal
    if reply.reward is None:
        return next(reversed(rewards.values())).value
    return reply.reward


async def _end_session_of_failed_episode(
    session: StartSessionReply, proxy: AsyncServiceClient
) -> EndSessionReply | None:
    try:
        return await _control_session(session, proxy, "/rl/end_session", Empty(), EndSessionReply)
    except HttpStatusError:
        return None


async def _control_session(
    session: StartSessionReply,
    proxy: AsyncServiceClient,
    route: str,
    request: msgspec.Struct,
    reply: type[ReplyT],
) -> ReplyT:
    key = session.control_key or session.api_key
    return await proxy.call_repeatedly(route, request, reply, key=key)

"""Completion service: one model call from prompt to recorded interaction."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from areal_hpc.errors import ProxyRequestError, RepeatedlyFailedCallError, UntrainableCallError
from areal_hpc.proxy.completion.prompts import PreparedCall, PromptBuilder
from areal_hpc.proxy.completion.streaming import RecordedChoice, ReplyChunk, ReplyStream
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.call_limits import (
    ConcurrentReplyLimiter,
    refuse_call_beyond_limits,
    reserve_reply_tokens_per_choice,
)
from areal_hpc.proxy.engine.failover import ReplyFailover
from areal_hpc.proxy.engine.generation import (
    EngineHungUpError,
    EngineResponseError,
    Generation,
    TokenChunk,
    UnfinishedEngineCallError,
    decode_generation,
)
from areal_hpc.proxy.engine.grammar_limits import GrammarChecks
from areal_hpc.proxy.engine.model_call import ModelCall, ReplyContent, ServedModel
from areal_hpc.proxy.engine.router import Router
from areal_hpc.proxy.engine.sglang_client import GenerateRequest, SGLangClient
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient, RemoteReplyParser
from areal_hpc.proxy.metrics import ProxyMetrics
from areal_hpc.proxy.sessions.events import InteractionAdded, ReplySampled
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rundir.telemetry.spans import record_span
from areal_hpc.session.call_records import compute_reply_digest
from areal_hpc.session.tree import (
    ABORT_FINISH_REASON,
    VersionSpan,
    format_ids_as_json_inside,
    join_json_array_insides,
    pack_ids,
)
from areal_hpc.wire.replicas import ReplicaView

log = logging.getLogger(__name__)

Result = TypeVar("Result")
MAX_ENGINE_FAILURES_PER_CALL = 3
"""Tries that an engine has received and answered with an error, or hung up on. A call that is
repeated for as long as its time lasts asks an engine that cannot answer it hundreds of times."""
MAX_REPLICA_HANGUPS_PER_CALL = 2
"""Replicas that may hang up on a call. Dying under two in turn is hardly a coincidence."""
RETRY_PAUSE_S = 0.2
RETRY_PAUSE_AFTER_ENGINE_ERROR_S = 1.0
"""Time to learn whether the engine still serves."""
EMPTY_CHUNK = TokenChunk("", [], [], [])
GenerateOnReplica = Callable[[ReplicaView, GenerateRequest, float], Awaitable[Generation]]
"""(replica, request, seconds left) -> what was generated there."""


class CompletionService:
    """Answers model calls: everything between a parsed request and a recorded interaction."""

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        upstream: SGLangClient,
        recorder: JournaledRecorder,
        limits: ProxyLimits,
        parsers: ParserProcessClient | None = None,
        grammars: GrammarChecks | None = None,
    ) -> None:
        self.metrics = ProxyMetrics()
        self._grammars = grammars or GrammarChecks(None)
        self.prompts = PromptBuilder(model, parsers, self._grammars, limits, self.metrics)
        self._encoder = model.encoder
        self._limiter = ConcurrentReplyLimiter(limits)
        self._timeout_s = limits.request_timeout_s
        self._parsers = parsers
        self._router = router
        self._upstream = upstream
        self.recorder = recorder
        self._speaking: set[asyncio.Task[None]] = set()

    async def answer(
        self, session: Session, call: ModelCall, answer_id: str
    ) -> list[RecordedChoice]:
        """Generate and record `call.n` replies. The interactions are in the journal on return.

        The first choice's interaction has the id `answer_id`, choice i has `<answer_id>-<i>`.
        """
        self._limiter.admit(session, call.n)
        reserved_tokens = 0
        try:
            prompt = await self.prompts.prepare_call(session, call, answer_id)
            reserved_tokens = call.n * prompt.reserved_tokens_per_choice
            answers = await _gather(
                [self._generate_choice(prompt, choice) for choice in range(call.n)]
            )
            said = [await self._parse_reply(prompt, generation) for generation, _ in answers]
            return [
                self._record_reply(prompt, choice, *answer, said[choice])
                for choice, answer in enumerate(answers)
            ]
        finally:
            self._limiter.release(session, call.n, reserved_tokens)

    async def generate_unrecorded(self, session: Session, request: GenerateRequest) -> bytes:
        """SGLang's answer to a client that records its own calls; the journal notes the reply."""
        give_up_at = time.monotonic() + self._timeout_s
        self._limiter.admit(session, 1)
        reserved_tokens = 0
        try:
            refuse_call_beyond_limits(session, 1)
            await self._grammars.refuse_costly_grammar(session, request.sampling)
            sampling, reserved_tokens = await reserve_reply_tokens_per_choice(
                session, request.sampling, 1, give_up_at
            )
            request = msgspec.structs.replace(request, sampling=sampling)
            answer = await self._send_once(session, request, give_up_at)
        finally:
            self._limiter.release(session, 1, reserved_tokens)
        try:
            reply = decode_generation("a replica", answer)
        except (UnfinishedEngineCallError, ProxyRequestError):
            return answer  # the client reads the same in it, and has nothing to record
        self._advance_newest_version(reply.spans)
        digest = compute_reply_digest(
            request.prompt_ids_json_inside,
            pack_ids(reply.output_ids),
            reply.pack_behavior_logprobs(),
            reply.spans,
            *reply.pack_sampling_mask(),
        )
        if self.recorder.holds_session(session):
            sampled = ReplySampled(session.session_id, digest, len(reply.output_ids))
            self.recorder.journal_and_apply(sampled)
        return answer

    async def _send_once(
        self, session: Session, request: GenerateRequest, give_up_at: float
    ) -> bytes:
        replica = await self._router.pick_replica(session, give_up_at)
        left_s = max(1.0, give_up_at - time.monotonic())
        self._router.on_call_started(replica)
        try:
            return await self._upstream.generate_raw(replica, request, left_s)
        except UnfinishedEngineCallError as lost:
            self._router.on_call_lost(replica, lost)
            raise ProxyRequestError(502, f"the replica was lost: {lost}") from lost
        finally:
            self._router.on_call_finished(session, replica)

    def _advance_newest_version(self, spans: Sequence[VersionSpan]) -> None:
        self._router.advance_newest_version(max((span.version for span in spans), default=0))

    async def _generate_choice(
        self, prompt: PreparedCall, choice_index: int
    ) -> tuple[Generation, int]:
        """One choice, whole. What a replica said before it broke the call off is gone on from.

        Sampling it anew would favor short replies: those are broken off more rarely.
        """
        failover = ReplyFailover(self._encoder)

        async def generate(
            replica: ReplicaView, whole: GenerateRequest, timeout_s: float
        ) -> Generation:
            nonlocal failover
            request = failover.build_next_request(whole)
            self.metrics.failovers.inc(request is not whole)
            generation = await self._upstream.generate(replica, request, timeout_s)
            if generation.finish_reason == ABORT_FINISH_REASON:
                failover.keep_aborted_part(generation, request)
                if not failover.is_possible:  # nobody has seen any of it
                    failover = ReplyFailover(self._encoder)
                raise UnfinishedEngineCallError(f"{replica.url} aborted the generation")
            return failover.join_replies(generation)

        return await self._generate_with_failover(prompt, choice_index, generate)

    async def _parse_reply(self, prompt: PreparedCall, generation: Generation) -> ReplyContent:
        reader = self._make_reply_parser(prompt)
        if reader is None:
            return ReplyContent(generation.text)
        said, is_cut = ReplyContent(), not generation.ends_with_stop_token
        said.append(await reader.feed(generation.text, is_last=True, is_cut=is_cut))
        return said

    def _make_reply_parser(self, prompt: PreparedCall) -> RemoteReplyParser | None:
        if self._parsers is None or prompt.parseable_tools is None:
            return None
        opening = prompt.turn.text_after_messages
        return self._parsers.build_reply_parser(prompt.parseable_tools, opening)

    async def stream(self, session: Session, call: ModelCall, answer_id: str) -> ReplyStream:
        """Begin to generate `call.n` replies; each is in the journal before it is told."""
        self._limiter.admit(session, call.n)  # each reply ends by itself
        try:
            prompt = await self.prompts.prepare_call(session, call, answer_id)
        except BaseException:  # boundary: a client that hangs up leaves nothing counted
            self._limiter.release(session, call.n)
            raise
        live = ReplyStream(call.n, prompt.prompt_tokens)
        for choice in range(call.n):
            task = asyncio.ensure_future(self._stream_choice(prompt, choice, live))
            self._speaking.add(task)
            task.add_done_callback(self._speaking.discard)
        return live

    async def _stream_choice(
        self, prompt: PreparedCall, choice_index: int, reply_stream: ReplyStream
    ) -> None:
        said, reader = ReplyContent(), self._make_reply_parser(prompt)
        failover, first_token_at = ReplyFailover(self._encoder), 0.0

        async def take(piece: TokenChunk) -> None:
            nonlocal first_token_at
            first_token_at = first_token_at or time.time()
            part = ReplyContent(piece.text) if reader is None else await reader.feed(piece.text)
            said.append(part)
            reply_stream.put(ReplyChunk(choice_index, part, piece))

        async def generate(
            replica: ReplicaView, whole: GenerateRequest, timeout_s: float
        ) -> Generation:
            if reply_stream.abandoned:  # while no replica served, say
                raise ProxyRequestError(503, "the client disconnected before the call began")
            request = failover.build_next_request(whole)
            self.metrics.failovers.inc(request is not whole)
            reply_stream.register_stop_callback(
                choice_index, partial(self._upstream.abort, replica, request.rid)
            )
            try:
                generation = await self._upstream.generate_streaming(
                    replica, request, timeout_s, take
                )
            except UnfinishedEngineCallError as lost:
                failover.on_replica_lost(lost.partial, replica, request)
                raise
            if generation.finish_reason == ABORT_FINISH_REASON and not reply_stream.abandoned:
                failover.keep_aborted_part(generation, request)
                raise UnfinishedEngineCallError(f"{replica.url} aborted the generation")
            return failover.join_replies(generation)

        try:
            generation, replica = await self._generate_with_failover(
                prompt,
                choice_index,
                generate,
                lambda: failover.is_possible and not reply_stream.abandoned,
            )
            if reader is not None:
                is_cut = not generation.ends_with_stop_token
                rest = await reader.feed("", is_last=True, is_cut=is_cut)
                said.append(rest)
                reply_stream.put(ReplyChunk(choice_index, rest, EMPTY_CHUNK))
            if reply_stream.abandoned:
                # Nobody knows how much of it was read: it counts as broken off.
                generation = msgspec.structs.replace(generation, finish_reason=ABORT_FINISH_REASON)
            if generation.output_ids or not reply_stream.abandoned:
                recorded = self._record_reply(
                    prompt, choice_index, generation, replica, said, first_token_at
                )
                reply_stream.put(recorded)
        except Exception as error:  # boundary: raised again where the stream is read
            if reply_stream.abandoned:
                log.info("a stream failed after its client disconnected: %s", error)
            reply_stream.put(error)
        finally:
            reply_stream.unregister_stop_callback(choice_index)
            self._limiter.release(prompt.session, 1, prompt.reserved_tokens_per_choice)

    async def _generate_with_failover(
        self,
        prompt: PreparedCall,
        choice_index: int,
        attempt: GenerateOnReplica,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> tuple[Generation, int]:
        """What was generated, and the index of the replica that said the end of it."""
        # A replica that cannot be reached, or breaks a call off as it was told to, says nothing of
        # the call: that is not counted.
        session, lost = prompt.session, set[int]()
        failed, hung_up = 0, set[tuple[int, int]]()
        while True:
            replica = await self._router.pick_replica(session, prompt.give_up_at, lost)
            timeout_s = max(prompt.give_up_at - time.monotonic(), 0.001)
            self._router.on_call_started(replica)
            began_at = time.time()
            try:
                generation = await attempt(replica, prompt.build_request(choice_index), timeout_s)
                return generation, replica.index
            except UnfinishedEngineCallError as error:
                log.warning("replica %d lost a call: %s", replica.index, error)
                _record_call_span("lost call", session, began_at, time.time(), replica.index)
                self._router.on_call_lost(replica, error)
                if time.monotonic() >= prompt.give_up_at or not may_repeat():
                    raise ProxyRequestError(503, f"the replica was lost: {error}") from error
                lost.add(replica.index)
                is_answered = isinstance(error, EngineResponseError)
                if isinstance(error, EngineHungUpError):
                    hung_up.add((replica.index, replica.incarnation))
                failed += is_answered or isinstance(error, EngineHungUpError)
                problem = f"{failed} tries of this call failed"
                if len(hung_up) >= MAX_REPLICA_HANGUPS_PER_CALL:
                    problem = f"{len(hung_up)} replicas hung up on this call, so no other is asked"
                elif failed < MAX_ENGINE_FAILURES_PER_CALL:
                    problem = ""
                if problem:
                    self.metrics.failed_calls.inc()
                    raise RepeatedlyFailedCallError(f"{problem}: {error}") from error
                pause_s = RETRY_PAUSE_AFTER_ENGINE_ERROR_S if is_answered else RETRY_PAUSE_S
            finally:
                self._router.on_call_finished(session, replica)
            await asyncio.sleep(pause_s)

    def _record_reply(
        self,
        prompt: PreparedCall,
        choice_index: int,
        generation: Generation,
        replica: int,
        reply: ReplyContent,
        first_token_at: float = 0.0,
    ) -> RecordedChoice:
        session = prompt.session
        if session.ended or not self.recorder.holds_session(session):
            raise ProxyRequestError(403, "the session ended during generation")
        interaction = prompt.build_interaction(
            choice_index, generation, replica, reply, first_token_at
        )
        try:
            self.recorder.journal_and_apply(
                InteractionAdded(
                    session.session_id, interaction, hidden=not prompt.call.is_retrievable
                )
            )
        except UntrainableCallError as error:
            raise ProxyRequestError(502, f"the model server's reply is unsound: {error}") from error
        _record_call_span(
            "call",
            session,
            interaction.asked_at,
            interaction.answered_at,
            interaction.replica,
            prompt_tokens=interaction.prompt_tokens,
            reply_tokens=interaction.num_output_tokens,
            cached_tokens=interaction.cached_tokens,
        )
        self._advance_newest_version(interaction.spans)
        own_json = join_json_array_insides(
            prompt.new_ids_json_inside, format_ids_as_json_inside(generation.output_ids)
        )
        session.tree.cache_ids_json(interaction.interaction_id, own_json)
        return RecordedChoice(choice_index, interaction, generation, reply)


async def _gather(calls: list[Coroutine[Any, Any, Result]]) -> list[Result]:
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def _record_call_span(
    name: str, session: Session, begin: float, end: float, replica: int, **tokens: int
) -> None:
    facts = {}
    if (ref := session.request.ref) is not None:
        facts = {"ticket_id": ref.ticket_id, "attempt": ref.attempt}
        facts |= {"eval_step": ref.eval_step} if ref.eval_step >= 0 else {}
        facts["episode"] = session.request.episode
    record_span(name, begin, end, f"replica {replica}", **facts, **tokens)

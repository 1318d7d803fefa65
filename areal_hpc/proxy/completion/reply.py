"""One reply of the model, generated to its end whatever becomes of the replicas that say it.

A call that nobody has seen anything of is repeated whole. One whose client has read tokens cannot
be: they would come out otherwise. Another replica is then asked to go on after them. What is
recorded is exactly what was sampled: every token with its log-probability and its version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from areal_hpc.errors import ProxyRequestError, RepeatedlyFailedCallError
from areal_hpc.proxy.completion.prompts import PreparedCall
from areal_hpc.proxy.engine.generation import (
    NO_PENALTIES,
    EngineHungUpError,
    EngineResponseError,
    Generation,
    TokenChunk,
    UnfinishedEngineCallError,
    count_stop_prefix_chars,
)
from areal_hpc.proxy.engine.model_call import ReplyContent
from areal_hpc.proxy.engine.router import Router, pack_weight_version
from areal_hpc.proxy.engine.sglang_client import GenerateRequest, SGLangClient
from areal_hpc.proxy.metrics import ProxyMetrics
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.rundir.telemetry.spans import record_span
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.session.tree import (
    ABORT_FINISH_REASON,
    Interaction,
    VersionSpan,
    format_ids_as_json_inside,
    join_json_array_insides,
)
from areal_hpc.wire.replicas import ReplicaView

log = logging.getLogger(__name__)

MAX_ENGINE_FAILURES_PER_CALL = 3
"""Tries that an engine has received and answered with an error, or hung up on. A call that is
repeated for as long as its time lasts asks an engine that cannot answer it hundreds of times."""
MAX_REPLICA_HANGUPS_PER_CALL = 2
"""Replicas that may hang up on a call. Dying under two in turn is hardly a coincidence."""
RETRY_PAUSE_S = 0.2
RETRY_PAUSE_AFTER_ENGINE_ERROR_S = 1.0
"""Time to learn whether the engine still serves."""


class RecordedChoice(msgspec.Struct, frozen=True):
    choice: int
    interaction: Interaction
    generation: Generation
    said: ReplyContent

    @property
    def finish_reason(self) -> str:
        reason = self.generation.finish_reason
        return "tool_calls" if reason == "stop" and self.said.calls else reason


class ReplyChunk(msgspec.Struct, frozen=True):
    choice: int
    said: ReplyContent
    piece: TokenChunk
    """The tokens that came with it; those of text held back come early, never late."""


@dataclass(slots=True)
class ReplyStream:
    """The choices of one streamed call, in the order in which things happen.

    Iterating gives chunks, then a `RecordedChoice` for each choice; it raises what broke a choice.
    """

    choices: int
    prompt_tokens: int = 0
    abandoned: bool = False
    _happened: asyncio.Queue[ReplyChunk | RecordedChoice | Exception] = field(
        default_factory=asyncio.Queue
    )
    _stops: dict[int, Callable[[], None]] = field(default_factory=dict)
    _ended: int = 0

    def put(self, event: ReplyChunk | RecordedChoice | Exception) -> None:
        self._happened.put_nowait(event)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> ReplyChunk | RecordedChoice:
        if self._ended == self.choices:
            raise StopAsyncIteration
        event = await self._happened.get()
        if isinstance(event, Exception):
            raise event
        self._ended += isinstance(event, RecordedChoice)
        return event

    def stop_generation(self) -> None:
        self.abandoned = True
        for stop in self._stops.values():
            stop()

    def register_stop_callback(self, choice_index: int, stop: Callable[[], None]) -> None:
        self._stops[choice_index] = stop
        if self.abandoned:
            stop()

    def unregister_stop_callback(self, choice_index: int) -> None:
        self._stops.pop(choice_index, None)


@dataclass(slots=True, eq=False)
class ReplyGenerator:
    """Generates one reply; with a `stream`, each piece of it goes to `take_chunk` as it comes."""

    router: Router
    upstream: SGLangClient
    metrics: ProxyMetrics
    encoder: TokenEncoder
    prompt: PreparedCall
    choice_index: int
    stream: ReplyStream | None = None
    take_chunk: Callable[[TokenChunk], Awaitable[None]] | None = None
    _said: Generation | None = None
    """What lost replicas said of the reply."""
    _can_continue: bool = True
    """False once something was said that another replica cannot go on from."""

    async def run(self) -> tuple[Generation, int]:
        """The reply, and the index of the replica that said the end of it."""
        # A replica that cannot be reached, or breaks a call off as it was told to, says nothing of
        # the call: that is not counted.
        session, give_up_at = self.prompt.session, self.prompt.give_up_at
        lost, failed, hung_up = set[int](), 0, set[tuple[int, int]]()
        while True:
            replica = await self.router.pick_replica(session, give_up_at, lost)
            self.router.on_call_started(replica)
            began_at = time.time()
            try:
                return await self._ask(replica, give_up_at), replica.index
            except UnfinishedEngineCallError as error:
                log.warning("replica %d lost a call: %s", replica.index, error)
                record_call_span("lost call", session, began_at, time.time(), replica.index)
                self.router.on_call_lost(replica, error)
                if time.monotonic() >= give_up_at or not self._may_repeat:
                    raise ProxyRequestError(503, f"the replica was lost: {error}") from error
                lost.add(replica.index)
                is_answered = isinstance(error, EngineResponseError)
                if isinstance(error, EngineHungUpError):
                    hung_up.add((replica.index, replica.incarnation))
                failed += is_answered or isinstance(error, EngineHungUpError)
                problem = ""
                if len(hung_up) >= MAX_REPLICA_HANGUPS_PER_CALL:
                    problem = f"{len(hung_up)} replicas hung up on this call, so no other is asked"
                elif failed >= MAX_ENGINE_FAILURES_PER_CALL:
                    problem = f"{failed} tries of this call failed"
                if problem:
                    self.metrics.failed_calls.inc()
                    raise RepeatedlyFailedCallError(f"{problem}: {error}") from error
                pause_s = RETRY_PAUSE_AFTER_ENGINE_ERROR_S if is_answered else RETRY_PAUSE_S
            finally:
                self.router.on_call_finished(session, replica)
            await asyncio.sleep(pause_s)

    @property
    def _may_repeat(self) -> bool:
        return self.stream is None or (self._can_continue and not self.stream.abandoned)

    async def _ask(self, replica: ReplicaView, give_up_at: float) -> Generation:
        request, stream = self._build_request(), self.stream
        timeout_s = max(give_up_at - time.monotonic(), 0.001)
        if stream is None or self.take_chunk is None:
            generation = await self.upstream.generate(replica, request, timeout_s)
        elif stream.abandoned:  # while no replica served, say
            raise ProxyRequestError(503, "the client disconnected before the call began")
        else:
            stream.register_stop_callback(
                self.choice_index, partial(self.upstream.abort, replica, request.rid)
            )
            try:
                generation = await self.upstream.generate_streaming(
                    replica, request, timeout_s, self.take_chunk
                )
            except UnfinishedEngineCallError as lost:
                self._keep_lost_part(lost.partial, replica, request)
                raise
        has_aborted = generation.finish_reason == ABORT_FINISH_REASON
        if has_aborted and not (stream is not None and stream.abandoned):
            # Nobody in a run asks for that; the owner of servers behind a standalone proxy may,
            # whose `pause_generation` aborts unless told otherwise.
            self._keep_part(generation, request)
            if stream is None and not self._can_continue:  # nobody has seen any of it
                self._said, self._can_continue = None, True
            raise UnfinishedEngineCallError(f"{replica.url} aborted the generation")
        return join_replies(self._said, generation)

    def _build_request(self) -> GenerateRequest:
        request = self.prompt.build_request(self.choice_index)
        if self._said is None:
            return request
        self.metrics.failovers.inc()
        ids = self._said.output_ids
        left_tokens = request.sampling.max_new_tokens - len(ids)
        return msgspec.structs.replace(
            request,
            prompt_ids_json_inside=join_json_array_insides(
                request.prompt_ids_json_inside, format_ids_as_json_inside(ids)
            ),
            sampling=msgspec.structs.replace(request.sampling, max_new_tokens=left_tokens),
        )

    def _keep_lost_part(
        self, partial_reply: Generation | None, replica: ReplicaView, request: GenerateRequest
    ) -> None:
        """Keep what a replica had said, None if its stream was not sound, when it was lost.

        A token that came while the replica still had the version of when it was asked was sampled
        from that one: versions only grow.
        """
        if partial_reply is None:
            self._can_continue = False
        elif partial_reply.output_ids:
            known = replica.version and pack_weight_version(replica.version)
            self._keep_part(partial_reply, request)
            self._can_continue &= partial_reply.spans[0].version == known

    def _keep_part(self, generation: Generation, request: GenerateRequest) -> None:
        if not generation.output_ids:
            return
        sampling = request.sampling
        text = self.encoder.decode(
            generation.output_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        # A character of which only a part has come, the beginning of a stop string, the state of
        # a grammar or of penalties: all that would be lost between the two replicas.
        self._can_continue = (
            text == generation.text
            and not count_stop_prefix_chars(text, sampling.stop or ())
            and len(generation.output_ids) < sampling.max_new_tokens
            and not sampling.active_grammar_names
            and sampling.penalties == NO_PENALTIES
            and not sampling.min_new_tokens
        )
        self._said = join_replies(self._said, generation)


def join_replies(said: Generation | None, generation: Generation) -> Generation:
    """What a lost replica said of a reply, and what another one said after it."""
    if said is None:
        return generation
    spans = list(said.spans)
    for span in generation.spans:
        start, end = (len(said.output_ids) + place for place in (span.start, span.end))
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(span.version, start, end))
    is_kept = bool(said.sampling_mask_ids) and bool(generation.sampling_mask_ids)
    mask_ids = said.sampling_mask_ids + generation.sampling_mask_ids
    mask_logprobs = said.sampling_mask_logprobs + generation.sampling_mask_logprobs
    return msgspec.structs.replace(
        generation,
        sampling_mask_ids=mask_ids if is_kept else [],
        sampling_mask_logprobs=mask_logprobs if is_kept else [],
        text=said.text + generation.text,
        output_ids=said.output_ids + generation.output_ids,
        logprobs=said.logprobs + generation.logprobs,
        spans=spans,
        top_logprobs=said.top_logprobs + generation.top_logprobs,
        cached_tokens=said.cached_tokens,
        # This replica has read again what the other one said.
        routes=said.routes + generation.routes[len(said.routes) :],
    )


def record_call_span(
    name: str, session: Session, begin: float, end: float, replica: int, **tokens: int
) -> None:
    facts = {}
    if (ref := session.request.ref) is not None:
        facts = {"ticket_id": ref.ticket_id, "attempt": ref.attempt}
        facts |= {"eval_step": ref.eval_step} if ref.eval_step >= 0 else {}
        facts["episode"] = session.request.episode
    record_span(name, begin, end, f"replica {replica}", **facts, **tokens)

"""Generation of one reply, which goes on when the replica that samples it is lost.

A call whose client has read nothing is repeated whole. Otherwise the repetition would sample other
tokens than the client has read, so another replica continues after them. The record has exactly
the sampled tokens, each with its log-probability and its weight version.
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
"""Tries to which an engine may respond with an error or a hang-up. Without this limit a call that
engines cannot answer would be sent hundreds of times."""
MAX_REPLICA_HANGUPS_PER_CALL = 2
"""Replicas that may hang up on a call: after two the call itself is the probable cause."""
RETRY_PAUSE_S = 0.2
RETRY_PAUSE_AFTER_ENGINE_ERROR_S = 1.0
"""Pause that lets the router learn whether the engine still serves."""


class RecordedChoice(msgspec.Struct, frozen=True):
    choice: int
    interaction: Interaction
    generation: Generation
    content: ReplyContent

    @property
    def finish_reason(self) -> str:
        reason = self.generation.finish_reason
        return "tool_calls" if reason == "stop" and self.content.calls else reason


class ReplyChunk(msgspec.Struct, frozen=True):
    choice: int
    content: ReplyContent
    tokens: TokenChunk
    """Tokens sampled since the last chunk; they come before their text if that is held back."""


@dataclass(slots=True)
class ReplyStream:
    """Events of one streamed call, of all its choices.

    Iterating yields chunks and a `RecordedChoice` at the end of each choice; it raises the error
    of a choice.
    """

    choices: int
    prompt_tokens: int = 0
    abandoned: bool = False
    _events: asyncio.Queue[ReplyChunk | RecordedChoice | Exception] = field(
        default_factory=asyncio.Queue
    )
    _stops: dict[int, Callable[[], None]] = field(default_factory=dict)
    _ended: int = 0

    def put(self, event: ReplyChunk | RecordedChoice | Exception) -> None:
        self._events.put_nowait(event)

    def __aiter__(self) -> ReplyStream:
        return self

    async def __anext__(self) -> ReplyChunk | RecordedChoice:
        if self._ended == self.choices:
            raise StopAsyncIteration
        event = await self._events.get()
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
    """Generator of one reply; with a `stream` it passes each chunk to `take_chunk`."""

    router: Router
    upstream: SGLangClient
    metrics: ProxyMetrics
    encoder: TokenEncoder
    prompt: PreparedCall
    choice_index: int
    stream: ReplyStream | None = None
    take_chunk: Callable[[TokenChunk], Awaitable[None]] | None = None
    _sampled: Generation | None = None
    """Part of the reply that lost replicas sampled."""
    _can_continue: bool = True
    """Whether another replica can continue after that part."""

    async def run(self) -> tuple[Generation, int]:
        """Return the reply, and the index of the replica that sampled its end."""
        # Only failures that may be due to the call count: not an unreachable replica, and not a
        # generation that the server was told to abort.
        session, give_up_at = self.prompt.session, self.prompt.give_up_at
        lost, failed, hung_up = set[int](), 0, set[tuple[int, int]]()
        while True:
            replica = await self.router.pick_replica(session, give_up_at, lost)
            self.router.on_call_started(replica)
            began_at = time.time()
            try:
                return await self._call_replica(replica, give_up_at), replica.index
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
                    problem = f"{len(hung_up)} replicas hung up on this call, so no other is tried"
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

    async def _call_replica(self, replica: ReplicaView, give_up_at: float) -> Generation:
        request, stream = self._build_request(), self.stream
        timeout_s = max(give_up_at - time.monotonic(), 0.001)
        if stream is None or self.take_chunk is None:
            generation = await self.upstream.generate(replica, request, timeout_s)
        elif stream.abandoned:  # for example while no replica served
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
            # Nothing in a run aborts like this; the owner of servers behind a standalone proxy may,
            # because SGLang's `pause_generation` aborts by default.
            self._keep_part(generation, request)
            if stream is None and not self._can_continue:  # no client has read any of it
                self._sampled, self._can_continue = None, True
            raise UnfinishedEngineCallError(f"{replica.url} aborted the generation")
        return join_replies(self._sampled, generation)

    def _build_request(self) -> GenerateRequest:
        request = self.prompt.build_request(self.choice_index)
        if self._sampled is None:
            return request
        self.metrics.failovers.inc()
        ids = self._sampled.output_ids
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
        """Keep the part of a reply that a lost replica sampled; None if its stream was unsound.

        It can be continued if the replica reported the same weight version with it as before the
        call: versions only grow, so all its tokens were sampled from that one.
        """
        if partial_reply is None:
            self._can_continue = False
        elif partial_reply.output_ids:
            version = replica.version and pack_weight_version(replica.version)
            self._keep_part(partial_reply, request)
            self._can_continue &= partial_reply.spans[0].version == version

    def _keep_part(self, generation: Generation, request: GenerateRequest) -> None:
        if not generation.output_ids:
            return
        sampling = request.sampling
        text = self.encoder.decode(
            generation.output_ids, skip_special_tokens=sampling.skip_special_tokens
        )
        # The next replica does not know a partial character, the beginning of a stop string, or
        # the state of a grammar or of penalties.
        self._can_continue = (
            text == generation.text
            and not count_stop_prefix_chars(text, sampling.stop or ())
            and len(generation.output_ids) < sampling.max_new_tokens
            and not sampling.active_grammar_names
            and sampling.penalties == NO_PENALTIES
            and not sampling.min_new_tokens
        )
        self._sampled = join_replies(self._sampled, generation)


def join_replies(before: Generation | None, generation: Generation) -> Generation:
    """Join the part of a reply that a lost replica sampled with the rest from another replica."""
    if before is None:
        return generation
    spans = list(before.spans)
    for span in generation.spans:
        start, end = (len(before.output_ids) + index for index in (span.start, span.end))
        if spans and spans[-1].version == span.version:
            start = spans.pop().start
        spans.append(VersionSpan(span.version, start, end))
    is_kept = bool(before.sampling_mask_ids) and bool(generation.sampling_mask_ids)
    mask_ids = before.sampling_mask_ids + generation.sampling_mask_ids
    mask_logprobs = before.sampling_mask_logprobs + generation.sampling_mask_logprobs
    return msgspec.structs.replace(
        generation,
        sampling_mask_ids=mask_ids if is_kept else [],
        sampling_mask_logprobs=mask_logprobs if is_kept else [],
        text=before.text + generation.text,
        output_ids=before.output_ids + generation.output_ids,
        logprobs=before.logprobs + generation.logprobs,
        spans=spans,
        top_logprobs=before.top_logprobs + generation.top_logprobs,
        cached_tokens=before.cached_tokens,
        # The routes of this replica begin anew: it has read the earlier tokens again.
        routes=before.routes + generation.routes[len(before.routes) :],
    )


def record_call_span(
    name: str, session: Session, begin: float, end: float, replica: int, **tokens: int
) -> None:
    attributes = {}
    if (ref := session.request.ref) is not None:
        attributes = {"ticket_id": ref.ticket_id, "attempt": ref.attempt}
        attributes |= {"eval_step": ref.eval_step} if ref.eval_step >= 0 else {}
        attributes["episode"] = session.request.episode
    record_span(name, begin, end, f"replica {replica}", **attributes, **tokens)

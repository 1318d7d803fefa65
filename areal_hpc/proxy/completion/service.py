"""Service of model calls: prepares a prompt, generates replies, records them as interactions."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import msgspec

from areal_hpc.errors import ProxyRequestError, UntrainableCallError
from areal_hpc.proxy.completion.prompts import (
    PreparedCall,
    PromptBuilder,
    encode_recorded_sampling,
)
from areal_hpc.proxy.completion.reply import (
    RecordedChoice,
    ReplyChunk,
    ReplyGenerator,
    ReplyStream,
    record_call_span,
)
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.generation import (
    Generation,
    TokenChunk,
    UnfinishedEngineCallError,
    decode_generation,
)
from areal_hpc.proxy.engine.limits import (
    ConcurrentReplyLimiter,
    GrammarChecks,
    refuse_call_beyond_limits,
    reserve_reply_tokens_per_choice,
)
from areal_hpc.proxy.engine.model_call import ModelCall, ReplyContent, ServedModel
from areal_hpc.proxy.engine.router import Router
from areal_hpc.proxy.engine.sglang_client import GenerateRequest, SGLangClient
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient, RemoteReplyParser
from areal_hpc.proxy.metrics import ProxyMetrics
from areal_hpc.proxy.sessions.recorder import JournaledRecorder
from areal_hpc.proxy.sessions.store import InteractionAdded, ReplySampled, Session
from areal_hpc.session.call_records import compute_reply_digest
from areal_hpc.session.tree import (
    ABORT_FINISH_REASON,
    Interaction,
    format_ids_as_json_inside,
    join_json_array_insides,
    pack_ids,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")
EMPTY_CHUNK = TokenChunk("", [], [], [])


class CompletionService:
    """Service that turns a parsed request into generated and recorded replies."""

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
        self._make_generator = partial(
            ReplyGenerator, router, upstream, self.metrics, model.encoder
        )
        self._limiter = ConcurrentReplyLimiter(limits)
        self._timeout_s = limits.request_timeout_s
        self._parsers = parsers
        self._router = router
        self._upstream = upstream
        self.recorder = recorder
        self._stream_tasks: set[asyncio.Task[None]] = set()

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
            generators = [self._make_generator(prompt, choice) for choice in range(call.n)]
            replies = await _gather([generator.run() for generator in generators])
            contents = [await self._parse_reply(prompt, generation) for generation, _ in replies]
            return [
                self._record_reply(prompt, choice, *reply, contents[choice])
                for choice, reply in enumerate(replies)
            ]
        finally:
            self._limiter.release(session, call.n, reserved_tokens)

    async def generate_unrecorded(self, session: Session, request: GenerateRequest) -> bytes:
        """Forward a request of a client that records its own calls; journal the reply's digest."""
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
            return answer  # the client reads the error in it, and has nothing to record
        self._router.note_sampled_versions(reply.spans)
        digest = compute_reply_digest(
            request.prompt_ids_json_inside,
            pack_ids(reply.output_ids),
            reply.pack_behavior_logprobs(),
            reply.spans,
            *reply.pack_sampling_mask(),
        )
        if self.recorder.holds_session(session):
            sampled = ReplySampled(session.session_id, digest, len(reply.output_ids))
            self.recorder.record(sampled)
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

    async def _parse_reply(self, prompt: PreparedCall, generation: Generation) -> ReplyContent:
        parser = self._make_reply_parser(prompt)
        if parser is None:
            return ReplyContent(generation.text)
        content, is_cut = ReplyContent(), not generation.ends_with_stop_token
        content.append(await parser.feed(generation.text, is_last=True, is_cut=is_cut))
        return content

    def _make_reply_parser(self, prompt: PreparedCall) -> RemoteReplyParser | None:
        if self._parsers is None or prompt.parseable_tools is None:
            return None
        opening = prompt.turn.text_after_messages
        return self._parsers.build_reply_parser(prompt.parseable_tools, opening)

    async def stream(self, session: Session, call: ModelCall, answer_id: str) -> ReplyStream:
        """Begin to generate `call.n` replies; each is in the journal before its end is sent."""
        self._limiter.admit(session, call.n)  # each reply ends by itself
        try:
            prompt = await self.prompts.prepare_call(session, call, answer_id)
        except BaseException:  # boundary: after a hang-up, too, the call no longer counts
            self._limiter.release(session, call.n)
            raise
        reply_stream = ReplyStream(call.n, prompt.prompt_tokens)
        for choice in range(call.n):
            task = asyncio.ensure_future(self._stream_choice(prompt, choice, reply_stream))
            self._stream_tasks.add(task)
            task.add_done_callback(self._stream_tasks.discard)
        return reply_stream

    async def _stream_choice(
        self, prompt: PreparedCall, choice_index: int, reply_stream: ReplyStream
    ) -> None:
        content, parser = ReplyContent(), self._make_reply_parser(prompt)
        first_token_at = 0.0

        async def take_chunk(chunk: TokenChunk) -> None:
            nonlocal first_token_at
            first_token_at = first_token_at or time.time()
            part = ReplyContent(chunk.text) if parser is None else await parser.feed(chunk.text)
            content.append(part)
            reply_stream.put(ReplyChunk(choice_index, part, chunk))

        try:
            generator = self._make_generator(prompt, choice_index, reply_stream, take_chunk)
            generation, replica = await generator.run()
            if parser is not None:
                is_cut = not generation.ends_with_stop_token
                rest = await parser.feed("", is_last=True, is_cut=is_cut)
                content.append(rest)
                reply_stream.put(ReplyChunk(choice_index, rest, EMPTY_CHUNK))
            if reply_stream.abandoned:
                # The client may not have read all of it: it counts as aborted.
                generation = msgspec.structs.replace(generation, finish_reason=ABORT_FINISH_REASON)
            if generation.output_ids or not reply_stream.abandoned:
                recorded = self._record_reply(
                    prompt, choice_index, generation, replica, content, first_token_at
                )
                reply_stream.put(recorded)
        except Exception as error:  # boundary: the reader of the stream raises it
            if reply_stream.abandoned:
                log.info("a stream failed after its client disconnected: %s", error)
            reply_stream.put(error)
        finally:
            reply_stream.unregister_stop_callback(choice_index)
            self._limiter.release(prompt.session, 1, prompt.reserved_tokens_per_choice)

    def _record_reply(
        self,
        prompt: PreparedCall,
        choice_index: int,
        generation: Generation,
        replica: int,
        reply: ReplyContent,
        first_token_at: float = 0.0,
    ) -> RecordedChoice:
        session, call, turn = prompt.session, prompt.call, prompt.turn
        if session.ended or not self.recorder.holds_session(session):
            raise ProxyRequestError(403, "the session ended during generation")
        answer_id, sampling = prompt.answer_id, prompt.get_choice_sampling(choice_index)
        kept_counts, kept_ids = generation.pack_sampling_mask()
        facts = msgspec.structs.replace(
            call.facts,
            asked_at=prompt.asked_at,
            first_token_at=first_token_at,
            answered_at=time.time(),
            replica=replica,
            cached_tokens=generation.cached_tokens,
        )
        interaction = Interaction(
            interaction_id=f"{answer_id}-{choice_index}" if choice_index else answer_id,
            parent_id=turn.parent.interaction_id if turn.parent is not None else None,
            reuse=turn.reuse,
            context=turn.context,
            new_messages=turn.new_messages,
            reply=reply.build_assistant_message(call.prefill or ""),
            prompt_tokens=prompt.prompt_tokens,
            new_ids=prompt.new_ids,
            output_ids=pack_ids(generation.output_ids),
            logprobs=generation.pack_behavior_logprobs(),
            spans=generation.spans,
            finish_reason=generation.finish_reason,
            closed=generation.ends_with_stop_token,
            temperature=sampling.temperature,
            sampling=encode_recorded_sampling(sampling),
            ignored=call.ignored_names,
            kept_counts=kept_counts,
            kept_ids=kept_ids,
            routes=prompt.record_routes(generation),
            **msgspec.structs.asdict(facts),
        )
        try:
            self.recorder.record(InteractionAdded(session.session_id, interaction))
        except UntrainableCallError as error:
            raise ProxyRequestError(502, f"the model server's reply is unsound: {error}") from error
        record_call_span(
            "call",
            session,
            interaction.asked_at,
            interaction.answered_at,
            replica,
            prompt_tokens=interaction.prompt_tokens,
            reply_tokens=interaction.num_output_tokens,
            cached_tokens=interaction.cached_tokens,
        )
        self._router.note_sampled_versions(interaction.spans)
        sequence_json_inside = join_json_array_insides(
            prompt.prompt_ids_json_inside, format_ids_as_json_inside(generation.output_ids)
        )
        session.tree.keep_latest_sequence(interaction.interaction_id, sequence_json_inside)
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

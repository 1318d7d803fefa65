"""One model call of a session, whatever dialect asked for it: splice, generate, record."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np

from areal_hpc.proxy.events import InteractionAdded
from areal_hpc.proxy.generation import Generation, Piece, SamplingParams, UpstreamLost
from areal_hpc.proxy.live import Answer, Delta, LiveAnswers
from areal_hpc.proxy.recorder import Recorder
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.replies import Said
from areal_hpc.proxy.routing import Router
from areal_hpc.proxy.sessions import Session
from areal_hpc.proxy.upstream import GenerateRequest, Upstream
from areal_hpc.session.template import ChatTemplate, Message, TemplateRefusal, TokenEncoder
from areal_hpc.session.tree import ABORTED, Interaction, Turn

log = logging.getLogger(__name__)

INLINE_ENCODE_CHARS = 8192
"""Longer texts are tokenised in a thread: 8 KiB take about 2 ms, which others must not wait."""
RETRY_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the request says about calling tools."""

    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    """The one tool that must be called."""
    parallel: bool = True
    """A reply may hold several calls."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A validated request, free of its dialect."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    variables: Mapping[str, Any] | None
    sampling: SamplingParams
    """`max_new_tokens` 0 means: as the session's defaults say."""
    max_tokens_key: str = "max_tokens"
    """What the dialect calls the limit of new tokens."""
    n: int = 1
    top_logprobs: int = 0
    tool_choice: ToolChoice = ToolChoice()


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the cell serves."""

    name: str
    template: ChatTemplate
    encoder: TokenEncoder
    context_tokens: int
    tool_call_parser: str | None = None
    """SGLang's name of the format of its tool calls."""
    reasoning_parser: str | None = None
    """SGLang's name of the format of its reasoning."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A call that is ready to be generated."""

    session: Session
    turn: Turn
    new_ids: bytes
    prompt_tokens: int
    prompt_json: bytes
    sampling: SamplingParams
    top_logprobs: int
    answer_id: str
    give_up_at: float
    asked_at: float
    """Unix time."""

    def request(self, choice: int) -> GenerateRequest:
        """One try at generating a choice."""
        seed = (self.sampling.sampling_seed or 0) + choice
        return GenerateRequest(
            secrets.token_hex(16),
            self.prompt_json,
            msgspec.structs.replace(self.sampling, sampling_seed=seed),
            self.top_logprobs,
        )

    def interaction(self, choice: int, generation: Generation, said: Said) -> Interaction:
        """What is recorded of a choice."""
        parent = self.turn.parent
        return Interaction(
            interaction_id=f"{self.answer_id}-{choice}" if choice else self.answer_id,
            parent_id=parent.interaction_id if parent is not None else None,
            splice=self.turn.splice,
            context=self.turn.context,
            new_messages=self.turn.new_messages,
            reply=said.message(),
            prompt_tokens=self.prompt_tokens,
            new_ids=self.new_ids,
            output_ids=np.asarray(generation.output_ids, "<i4").tobytes(),
            logprobs=np.asarray(generation.logprobs, "<f4").tobytes(),
            spans=generation.spans,
            finish_reason=generation.finish_reason,
            closed=generation.closed,
            temperature=self.sampling.temperature,
            asked_at=self.asked_at,
            answered_at=time.time(),
        )


Attempt = Callable[[str, GenerateRequest, float], Awaitable[Generation]]
"""(replica's URL, request, seconds left) -> what was generated there."""


class ModelCaller:
    """Answers model calls: everything between a parsed request and a recorded interaction."""

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        upstream: Upstream,
        recorder: Recorder,
        request_timeout_s: float,
    ) -> None:
        self._model = model
        self._router = router
        self._upstream = upstream
        self._recorder = recorder
        self._request_timeout_s = request_timeout_s
        self._speaking: set[asyncio.Task[None]] = set()

    async def answer(self, session: Session, call: ModelCall, answer_id: str) -> list[Answer]:
        """Generate and record `call.n` replies. The interactions are in the journal on return.

        Args:
            session: Who asks.
            call: What it asks.
            answer_id: Id of the first choice's interaction; choice i has `<answer_id>-<i>`.

        Raises:
            RequestRefused: The call cannot be answered.
        """
        with _in_flight(session):
            prompt = await self._prepare(session, call, answer_id)
            generations = await _together(
                [self._routed(prompt, choice, self._upstream.generate) for choice in range(call.n)]
            )
            return [
                self._record(prompt, choice, generation, Said(generation.text))
                for choice, generation in enumerate(generations)
            ]

    async def stream(self, session: Session, call: ModelCall, answer_id: str) -> LiveAnswers:
        """Begin to generate `call.n` replies; each is in the journal before its `Answer` comes.

        Raises:
            RequestRefused: The call cannot be answered.
        """
        with _in_flight(session):
            prompt = await self._prepare(session, call, answer_id)
        live = LiveAnswers(call.n)
        for choice in range(call.n):
            task = asyncio.ensure_future(self._speak(prompt, choice, live))
            self._speaking.add(task)
            task.add_done_callback(self._speaking.discard)
        return live

    async def _speak(self, prompt: _Prompt, choice: int, live: LiveAnswers) -> None:
        """Generate one choice into `live`; what was said is recorded even if nobody reads on."""
        said = Said()

        async def take(piece: Piece) -> None:
            part = Said(piece.text)
            said.add(part)
            live.put(Delta(choice, part, piece))

        async def generate(url: str, request: GenerateRequest, timeout_s: float) -> Generation:
            live.generating(choice, partial(self._upstream.abort, url, request.rid))
            generation = await self._upstream.generate_live(url, request, timeout_s, take)
            if generation.finish_reason == ABORTED and not live.abandoned:
                raise UpstreamLost(f"{url} broke the call off")
            return generation

        with _in_flight(prompt.session):
            try:
                generation = await self._routed(
                    prompt, choice, generate, may_repeat=lambda: not said and not live.abandoned
                )
                if generation.output_ids or not live.abandoned:
                    live.put(self._record(prompt, choice, generation, said))
            except Exception as error:  # boundary: raised again where the stream is read
                if live.abandoned:
                    log.info("an abandoned stream ended with: %s", error)
                live.put(error)
            finally:
                live.generated(choice)

    async def _prepare(self, session: Session, call: ModelCall, answer_id: str) -> _Prompt:
        give_up_at = time.monotonic() + self._request_timeout_s
        asked_at = time.time()
        turn, new_ids = await self._tokenise(session, call)
        prior = turn.parent.sequence_tokens if turn.parent is not None else 0
        prompt_tokens = prior + len(new_ids)
        sampling = self._fit(session, call, prompt_tokens)
        if sampling.sampling_seed is None:
            sampling = msgspec.structs.replace(sampling, sampling_seed=_session_seed(session))
        session.calls += 1
        return _Prompt(
            session=session,
            turn=turn,
            new_ids=np.asarray(new_ids, "<i4").tobytes(),
            prompt_tokens=prompt_tokens,
            prompt_json=_join(session.tree.sequence_json(turn.parent), new_ids),
            sampling=sampling,
            top_logprobs=call.top_logprobs,
            answer_id=answer_id,
            asked_at=asked_at,
            give_up_at=give_up_at,
        )

    async def _tokenise(self, session: Session, call: ModelCall) -> tuple[Turn, list[int]]:
        """What the call adds to the session's tree, and the token ids of that."""
        encoder = self._model.encoder
        try:
            turn = session.tree.open_turn(
                call.messages, self._model.template, tools=call.tools, variables=call.variables
            )
        except TemplateRefusal as error:
            raise RequestRefused(
                400, f"the model's chat template refuses the messages: {error}", key="messages"
            ) from error
        if len(turn.text) <= INLINE_ENCODE_CHARS:
            encoded = encoder.encode(turn.text)
        else:
            encoded = await asyncio.to_thread(encoder.encode, turn.text)
        new_ids = turn.new_ids(encoded)
        if turn.parent is None and not new_ids:
            raise RequestRefused(400, "the messages give an empty prompt", key="messages")
        if new_ids and max(new_ids) >= encoder.vocab_size:  # such an id would kill the engine
            raise RequestRefused(
                400,
                f"the messages hold token id {max(new_ids)}, which is outside the model's "
                f"vocabulary of {encoder.vocab_size}",
                key="messages",
            )
        return turn, new_ids

    def _fit(self, session: Session, call: ModelCall, prompt_tokens: int) -> SamplingParams:
        """The sampling parameters with a reply limit that the context has room for."""
        context_tokens = self._model.context_tokens
        room = context_tokens - prompt_tokens
        asked = call.sampling.max_new_tokens
        if room < 1 or asked > room:
            wanted = f" plus {asked} new ones" if asked else ""
            raise RequestRefused(
                400,
                f"the prompt's {prompt_tokens} tokens{wanted} exceed the model's context "
                f"of {context_tokens} tokens",
                key=call.max_tokens_key if asked and room >= 1 else "messages",
            )
        limit = asked or min(session.request.sampling.max_new_tokens, room)
        return msgspec.structs.replace(call.sampling, max_new_tokens=limit)

    async def _routed(
        self,
        prompt: _Prompt,
        choice: int,
        attempt: Attempt,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> Generation:
        """Generate on the session's replica; on another one if that is lost."""
        while True:
            replica = await self._router.pick(prompt.session.session_id, prompt.give_up_at)
            timeout_s = max(prompt.give_up_at - time.monotonic(), 0.001)
            self._router.began(replica)
            try:
                return await attempt(replica.url, prompt.request(choice), timeout_s)
            except UpstreamLost as error:
                log.warning("replica %d lost a call: %s", replica.index, error)
                self._router.lost(replica)
                if time.monotonic() >= prompt.give_up_at or not may_repeat():
                    raise RequestRefused(503, f"the replica was lost: {error}") from error
            finally:
                self._router.ended(replica)
            await asyncio.sleep(RETRY_PAUSE_S)

    def _record(self, prompt: _Prompt, choice: int, generation: Generation, said: Said) -> Answer:
        session = prompt.session
        if session.ended or not self._recorder.holds(session):
            raise RequestRefused(403, "the session ended while the model answered")
        interaction = prompt.interaction(choice, generation, said)
        self._recorder.record(InteractionAdded(session.session_id, interaction))
        return Answer(choice, interaction, generation, said)


@contextmanager
def _in_flight(session: Session) -> Iterator[None]:
    """A session is not idle while the model answers it."""
    session.in_flight += 1
    try:
        yield
    finally:
        session.in_flight -= 1
        session.touch()


async def _together(calls: list[Coroutine[Any, Any, Generation]]) -> list[Generation]:
    """All results, or the first failure after the others have been cancelled."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def _join(prior_json: bytes, new_ids: list[int]) -> bytes:
    new_json = msgspec.json.encode(new_ids)[1:-1]
    return b",".join(part for part in (prior_json, new_json) if part)


def _session_seed(session: Session) -> int:
    """A seed that differs between calls, episodes and tickets, and repeats with the run's seed."""
    request = session.request
    text = f"{request.seed}/{request.task_id}/{request.episode}/{session.calls}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest()) & 0x3FFFFFFF

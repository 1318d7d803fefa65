"""One model call of a session, whatever dialect asked for it: splice, generate, record."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from areal_hpc.proxy.events import InteractionAdded
from areal_hpc.proxy.recorder import Recorder
from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.proxy.routing import Router
from areal_hpc.proxy.sessions import Session
from areal_hpc.proxy.upstream import Generation, SamplingParams, Upstream, UpstreamLost
from areal_hpc.session.template import ChatTemplate, Message, TemplateRefusal, TokenEncoder
from areal_hpc.session.tree import Interaction, Turn

log = logging.getLogger(__name__)

INLINE_ENCODE_CHARS = 8192
"""Longer texts are tokenised in a thread: 8 KiB take about 2 ms, which others must not wait."""
RETRY_PAUSE_S = 0.2


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


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice: what was recorded, and what the dialect needs beyond it."""

    interaction: Interaction
    generation: Generation


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the cell serves."""

    name: str
    template: ChatTemplate
    encoder: TokenEncoder
    context_tokens: int


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

    async def answer(self, session: Session, call: ModelCall, answer_id: str) -> list[Answer]:
        """Generate and record `call.n` replies. The interactions are in the journal on return.

        Args:
            session: Who asks.
            call: What it asks.
            answer_id: Id of the first choice's interaction; choice i has `<answer_id>-<i>`.

        Raises:
            RequestRefused: The call cannot be answered.
        """
        give_up_at = time.monotonic() + self._request_timeout_s
        asked_at = time.time()
        turn, new_ids = await self._tokenise(session, call)
        prior = turn.parent.sequence_tokens if turn.parent is not None else 0
        prompt_tokens = prior + len(new_ids)
        sampling = self._fit(session, call, prompt_tokens)
        prompt_json = _join(session.tree.sequence_json(turn.parent), new_ids)
        seed = sampling.sampling_seed
        if seed is None:
            seed = _session_seed(session)
        session.calls += 1
        generations = await _together(
            [
                self._generate(
                    session,
                    prompt_json,
                    msgspec.structs.replace(sampling, sampling_seed=seed + choice),
                    call.top_logprobs,
                    give_up_at,
                )
                for choice in range(call.n)
            ]
        )
        packed = np.asarray(new_ids, "<i4").tobytes()
        answers = []
        for choice, generation in enumerate(generations):
            choice_id = f"{answer_id}-{choice}" if choice else answer_id
            interaction = _interaction(
                choice_id, turn, packed, prompt_tokens, generation, sampling.temperature, asked_at
            )
            self._record(session, interaction)
            answers.append(Answer(interaction, generation))
        return answers

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

    async def _generate(
        self,
        session: Session,
        prompt_json: bytes,
        sampling: SamplingParams,
        top_logprobs: int,
        give_up_at: float,
    ) -> Generation:
        """Generate on the session's replica; on another one if that is lost."""
        while True:
            replica = await self._router.pick(session.session_id, give_up_at)
            self._router.began(replica)
            try:
                return await self._upstream.generate(
                    replica.url,
                    prompt_json,
                    sampling,
                    rid=secrets.token_hex(16),
                    timeout_s=max(give_up_at - time.monotonic(), 0.001),
                    top_logprobs=top_logprobs,
                )
            except UpstreamLost as error:
                log.warning("replica %d lost a call: %s", replica.index, error)
                self._router.lost(replica)
                if time.monotonic() >= give_up_at:
                    raise RequestRefused(503, f"the replica was lost: {error}") from error
            finally:
                self._router.ended(replica)
            await asyncio.sleep(RETRY_PAUSE_S)

    def _record(self, session: Session, interaction: Interaction) -> None:
        if session.ended or not self._recorder.holds(session):
            raise RequestRefused(403, "the session ended while the model answered")
        self._recorder.record(InteractionAdded(session.session_id, interaction))


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


def _interaction(
    interaction_id: str,
    turn: Turn,
    new_ids: bytes,
    prompt_tokens: int,
    generation: Generation,
    temperature: float,
    asked_at: float,
) -> Interaction:
    return Interaction(
        interaction_id=interaction_id,
        parent_id=turn.parent.interaction_id if turn.parent is not None else None,
        splice=turn.splice,
        context=turn.context,
        new_messages=turn.new_messages,
        reply={"role": "assistant", "content": generation.text},
        prompt_tokens=prompt_tokens,
        new_ids=new_ids,
        output_ids=np.asarray(generation.output_ids, "<i4").tobytes(),
        logprobs=np.asarray(generation.logprobs, "<f4").tobytes(),
        spans=generation.spans,
        finish_reason=generation.finish_reason,
        closed=generation.closed,
        temperature=temperature,
        asked_at=asked_at,
        answered_at=time.time(),
    )

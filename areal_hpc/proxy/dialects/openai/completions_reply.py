"""OpenAI legacy Completions replies, whole or streamed."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_hpc.proxy.completion.streaming import RecordedReply, ReplyChunk, ReplyStream
from areal_hpc.proxy.dialects.dialect import Dialect
from areal_hpc.proxy.dialects.openai.completions_request import CompletionRequest, parse
from areal_hpc.proxy.dialects.openai.format import (
    ChoiceEvents,
    format_error,
    format_logprobs,
    format_usage,
)
from areal_hpc.proxy.engine.generation import Generation, TokenChunk
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.sessions.store import Session


class CompletionExchange:
    """A Completion that is asked for."""

    def __init__(self, request: CompletionRequest, call: ModelCall, model: ServedModel) -> None:
        self.call = call
        self.answer_id = f"cmpl-{os.urandom(14).hex()}"
        self.streams = bool(request.stream)
        self.counts_usage = request.counts_usage
        self._with_logprobs = request.logprobs is not None
        self._model = model
        self._created_at = int(time.time())

    def whole(self, answers: Sequence[RecordedReply]) -> bytes:
        """The JSON body of a Completion."""
        choices = [
            self.choice(
                answer.choice,
                answer.said.text,
                self.logprobs(answer.generation, 0),
                answer.finish_reason,
            )
            for answer in answers
        ]
        return msgspec.json.encode(
            {**self.frame(), "choices": choices, "usage": format_usage(answers)}
        )

    def events(self, live: ReplyStream) -> CompletionEventStream:
        """The chunks of a Completion."""
        return CompletionEventStream(self, live)

    def frame(self) -> dict[str, Any]:
        """What a Completion and each chunk of one begin with."""
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self._created_at,
            "model": self._model.name,
        }

    def choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        """One choice, or what is new of it."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def logprobs(self, said: Generation | TokenChunk, offset: int) -> dict[str, Any] | None:
        """The tokens in OpenAI's older shape, if they were asked for.

        Args:
            said: What has the tokens.
            offset: Where their text begins within the reply, in characters.
        """
        if not self._with_logprobs:
            return None
        tokens = format_logprobs(
            said.output_ids, said.logprobs, said.top_logprobs, self._model.encoder
        )
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token["token"])
        return {
            "tokens": [token["token"] for token in tokens],
            "token_logprobs": [token["logprob"] for token in tokens],
            "top_logprobs": [
                {one["token"]: one["logprob"] for one in (token, *token["top_logprobs"])}
                for token in tokens
            ],
            "text_offset": offsets,
        }


class CompletionEventStream(ChoiceEvents):
    """The server-sent events of a streamed Completion."""

    def __init__(self, exchange: CompletionExchange, live: ReplyStream) -> None:
        super().__init__(live, exchange.frame(), counts_usage=exchange.counts_usage)
        self._exchange = exchange
        self._token_chars: Counter[int] = Counter()
        """Characters of the tokens that were told, by choice."""

    def delta(self, delta: ReplyChunk) -> bytes:
        """One chunk."""
        logprobs = self._exchange.logprobs(delta.piece, self._token_chars[delta.choice])
        if logprobs is not None:
            self._token_chars[delta.choice] += sum(map(len, logprobs["tokens"]))
        return self.chunk(self._exchange.choice(delta.choice, delta.said.text, logprobs, None))

    def end(self, answer: RecordedReply) -> bytes:
        """A chunk without text."""
        return self.chunk(self._exchange.choice(answer.choice, "", None, answer.finish_reason))


def _read(body: bytes, session: Session, model: ServedModel) -> CompletionExchange:
    return CompletionExchange(*parse(body, session.request.sampling, model), model)


COMPLETIONS = Dialect(CompletionRequest, _read, format_error)

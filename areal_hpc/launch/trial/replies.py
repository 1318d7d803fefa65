"""Replies that the stand-in engine gives: random tokens, recorded ones, or another server's."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader

MAX_RANDOM_REPLY_TOKENS = 48
"""Longest random reply; a longer one shows nothing more."""
MAX_REPLAYED_ROWS = 2048
"""Rows of a run that are read for their replies."""
SERVER_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class EngineReply:
    """Tokens of one reply. Its log-probabilities are 0 where nobody knows them."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class EngineQuestion:
    """Part of a `/generate` request that a reply depends on."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float
    seed: int


class ReplySource(Protocol):
    """Decides what the stand-in engine says."""

    async def answer(self, question: EngineQuestion) -> EngineReply:
        """A reply of at most `max_new_tokens`, with the end-of-turn token if the turn ends."""

    async def close(self) -> None:
        """Close connections."""


class RandomReplies:
    """Tokens drawn evenly from those that are text, and the end of the turn behind them."""

    def __init__(self, encoder: TokenEncoder, end_id: int) -> None:
        self._text_ids = encoder.list_plain_text_token_ids()
        self._end_id = end_id

    async def answer(self, question: EngineQuestion) -> EngineReply:
        """The same reply to the same question."""
        rng = random.Random(f"{question.seed}/{len(question.prompt_ids)}")
        length = rng.randint(1, min(question.max_new_tokens, MAX_RANDOM_REPLY_TOKENS))
        ids = rng.choices(self._text_ids, k=length)
        if length < question.max_new_tokens:
            ids.append(self._end_id)
        return EngineReply(ids, [-math.log(len(self._text_ids))] * len(ids))

    async def close(self) -> None:
        """There is no connection."""


class RecordedReplies:
    """Replies from the shards of a run.

    A prompt that was recorded gets its own replies, one after the other; any other prompt gets the
    next reply of the run.
    """

    def __init__(self, run: RunPaths, vocab_size: int) -> None:
        self._by_prompt: dict[bytes, deque[EngineReply]] = defaultdict(deque)
        replies: list[EngineReply] = []
        for prompt, reply in _read_recorded_replies(run):
            if max(reply.token_ids) >= vocab_size:
                raise RecipeError(
                    f"a recorded reply has token id {max(reply.token_ids)}, the recipe's model has "
                    f"{vocab_size}",
                    key="--from",
                    hint="name a run of the same model",
                )
            self._by_prompt[prompt].append(reply)
            replies.append(reply)
        if not replies:
            raise RecipeError(
                f"there is no recorded reply in {run.root}",
                key="--from",
                hint="name a run that has sealed shards: areal-hpc shards ls RUN",
            )
        self._next_replies = itertools.cycle(replies)

    async def answer(self, question: EngineQuestion) -> EngineReply:
        """The recorded reply, cut to `max_new_tokens`."""
        own = self._by_prompt.get(np.asarray(question.prompt_ids, np.int32).tobytes())
        if own:
            reply = own[0]
            own.rotate(-1)
        else:
            reply = next(self._next_replies)
        most = question.max_new_tokens
        return EngineReply(reply.token_ids[:most], reply.logprobs[:most])

    async def close(self) -> None:
        """There is no connection."""


def _read_recorded_replies(run: RunPaths) -> list[tuple[bytes, EngineReply]]:
    """Each trained reply of the run's first rows, behind the bytes of its prompt's ids."""
    found, left = [], MAX_REPLAYED_ROWS
    for line in read_index(run.shard_index_dir):
        reader = ShardReader(run.shards_dir / line.file)
        count = min(left, reader.num_rows)
        left -= count
        for row in reader.read_rows(range(count)):
            is_trained = np.concatenate(([0], row.loss_mask_T != 0, [0]))
            for start, end in np.flatnonzero(np.diff(is_trained)).reshape(-1, 2).tolist():
                ids = row.input_ids_T[start:end].tolist()
                reply = EngineReply(ids, row.logprobs_T[start:end].tolist())
                found.append((row.input_ids_T[:start].astype(np.int32).tobytes(), reply))
    return found


class CompletionsServerReplies:
    """Replies of a server of OpenAI's legacy Completions: vLLM, llama.cpp, TGI.

    It reads the prompt as text, and its reply is tokenized here: ids and log-probabilities are
    not those that it sampled.
    """

    def __init__(self, base_url: str, encoder: TokenEncoder, end_id: int) -> None:
        self._base_url = base_url
        self._encoder, self._end_id = encoder, end_id
        self._model = ""
        key = os.environ.get("OPENAI_API_KEY", "")
        self._http = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=SERVER_TIMEOUT_S),
        )

    async def answer(self, question: EngineQuestion) -> EngineReply:
        if not self._model:
            self._model = (await self._call_server("GET", "/models"))["data"][0]["id"]
        body = {
            "model": self._model,
            "prompt": self._encoder.decode(question.prompt_ids),
            "max_tokens": question.max_new_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
        }
        choice = (await self._call_server("POST", "/completions", body))["choices"][0]
        ids = self._encoder.encode(choice["text"])[: question.max_new_tokens]
        if choice.get("finish_reason") == "stop" and len(ids) < question.max_new_tokens:
            ids.append(self._end_id)
        return EngineReply(ids, [0.0] * len(ids))

    async def _call_server(self, method: str, route: str, body: object = None) -> Any:
        url = f"{self._base_url}{route}"
        try:
            async with self._http.request(method, url, json=body) as answer:
                if answer.status == 200:
                    return await answer.json()
                said = (await answer.text())[:300]
        except (aiohttp.ClientError, OSError) as error:
            raise ClusterError(f"{url} does not answer: {error}", key="--base-url") from error
        raise ClusterError(
            f"{method} {url} answered {answer.status}: {said}",
            key="--base-url",
            hint="give the address of an SGLang server, or of one with /v1/completions",
        )

    async def close(self) -> None:
        await self._http.close()

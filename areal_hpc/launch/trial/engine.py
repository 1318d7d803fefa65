"""Stand-in engine of trials: SGLang's `/generate` with replies that need no model."""

import itertools
import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.wire.asgi import JsonApp, read_body

MAX_RANDOM_REPLY_TOKENS = 48
"""Longest random reply; a longer one shows nothing more."""
MAX_REPLAYED_ROWS = 2048
"""Rows of a run that are read for their replies."""
MAX_REQUEST_BYTES = 1 << 28
WEIGHT_VERSION = "default"
"""SGLang's version of weights that nobody gave one."""
GRAMMAR_NAMES = ("json_schema", "regex", "ebnf", "structural_tag")


class _SamplingParams(Struct):
    max_new_tokens: int
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class _GenerateRequest(Struct):
    input_ids: list[int]
    sampling_params: _SamplingParams
    rid: str = ""
    stream: bool = False
    top_logprobs_num: int = 0


@dataclass(frozen=True, slots=True)
class EngineReply:
    token_ids: list[int]
    """Ends with the end-of-turn token if the turn ends."""
    logprobs: list[float]


class ReplySource(Protocol):
    def choose_reply(self, prompt_ids: list[int], max_new_tokens: int, seed: int) -> EngineReply:
        """A reply of at most `max_new_tokens`."""


class RandomReplies:
    """Tokens drawn evenly from those that are text; the same reply to the same question."""

    def __init__(self, encoder: TokenEncoder, end_id: int) -> None:
        self._text_ids = encoder.list_plain_text_token_ids()
        self._end_id = end_id

    def choose_reply(self, prompt_ids: list[int], max_new_tokens: int, seed: int) -> EngineReply:
        rng = random.Random(f"{seed}/{len(prompt_ids)}")
        length = rng.randint(1, min(max_new_tokens, MAX_RANDOM_REPLY_TOKENS))
        ids = rng.choices(self._text_ids, k=length)
        if length < max_new_tokens:
            ids.append(self._end_id)
        return EngineReply(ids, [-math.log(len(self._text_ids))] * len(ids))


class RecordedReplies:
    """Replies from the shards of a run.

    A prompt that was recorded gets its own replies, one after the other; any other prompt gets the
    next reply of the run.
    """

    def __init__(self, run: RunPaths, vocab_size: int) -> None:
        self._by_prompt: dict[bytes, deque[EngineReply]] = defaultdict(deque)
        recorded = _read_recorded_replies(run)
        if not recorded:
            raise RecipeError(
                f"there is no recorded reply in {run.root}",
                key="--from",
                hint="name a run that has sealed shards: areal-hpc shards ls RUN",
            )
        largest = max(max(reply.token_ids) for _, reply in recorded)
        if largest >= vocab_size:
            raise RecipeError(
                f"a recorded reply has token id {largest}, the recipe's model has {vocab_size}",
                key="--from",
                hint="name a run of the same model",
            )
        for prompt, reply in recorded:
            self._by_prompt[prompt].append(reply)
        self._next_replies = itertools.cycle(reply for _, reply in recorded)

    def choose_reply(self, prompt_ids: list[int], max_new_tokens: int, seed: int) -> EngineReply:
        own = self._by_prompt.get(np.asarray(prompt_ids, np.int32).tobytes())
        if own:
            reply = own[0]
            own.rotate(-1)
        else:
            reply = next(self._next_replies)
        return EngineReply(reply.token_ids[:max_new_tokens], reply.logprobs[:max_new_tokens])


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


class StandInEngine(JsonApp):
    """The routes of SGLang that the proxy calls, answered from a `ReplySource`."""

    def __init__(self, encoder: TokenEncoder, end_id: int, replies: ReplySource) -> None:
        super().__init__()
        self._encoder, self._end_id, self._replies = encoder, end_id, replies
        self.ignored_grammars: set[str] = set()
        """Names of the grammars that requests asked for; replies do not follow them."""

    async def answer(self, request: Request) -> tuple[int, bytes]:
        match request.method, request.scope["path"]:
            case "GET", "/ready":
                return 200, b"{}"
            case "GET", "/model_info":
                return 200, msgspec.json.encode({"weight_version": WEIGHT_VERSION})
            case "POST", "/abort_request":
                return 200, b"{}"
            case "POST", "/generate":
                body = await read_body(request, MAX_REQUEST_BYTES)
                return 200, self._generate(msgspec.json.decode(body, type=_GenerateRequest))
        raise HTTPException(404, "no such route")

    def _generate(self, request: _GenerateRequest) -> bytes:
        sampling = request.sampling_params
        self.ignored_grammars.update(
            name for name in GRAMMAR_NAMES if getattr(sampling, name) is not None
        )
        reply = self._replies.choose_reply(
            request.input_ids, sampling.max_new_tokens, sampling.sampling_seed or 0
        )
        ids, count = reply.token_ids, len(reply.token_ids)
        is_ended = ids[-1] == self._end_id
        logprobs = [(logprob, id_, None) for logprob, id_ in zip(reply.logprobs, ids, strict=True)]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": {"type": "stop", "matched": self._end_id}
            if is_ended
            else {"type": "length", "length": count},
            "prompt_tokens": len(request.input_ids),
            "completion_tokens": count,
            "cached_tokens": 0,
            "output_token_logprobs": logprobs,
            "weight_version": WEIGHT_VERSION,
            "weight_versions": [{"version": WEIGHT_VERSION, "start": 0, "end": count}],
        }
        if request.top_logprobs_num:
            meta["output_top_logprobs"] = [[one] for one in logprobs]
        text = self._encoder.decode(ids[:-1] if is_ended else ids, skip_special_tokens=True)
        encoded = msgspec.json.encode({"text": text, "output_ids": ids, "meta_info": meta})
        return b"data: " + encoded + b"\n\ndata: [DONE]\n\n" if request.stream else encoded

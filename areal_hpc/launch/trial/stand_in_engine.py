"""Stand-in engine: SGLang's `/generate` over replies that need no model."""

from typing import Any

import msgspec
from msgspec import Struct, field
from starlette.exceptions import HTTPException
from starlette.requests import Request

from areal_hpc.launch.trial.replies import EngineQuestion, EngineReply, ReplySource
from areal_hpc.session.chat_template import TokenEncoder
from areal_hpc.wire.asgi import JsonApp, read_body

MAX_REQUEST_BYTES = 1 << 28
WEIGHT_VERSION = "default"
"""SGLang's version of weights that nobody gave one."""
GRAMMAR_NAMES = ("json_schema", "regex", "ebnf", "structural_tag")


class _SamplingParams(Struct):
    max_new_tokens: int
    temperature: float = 1.0
    sampling_seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
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


class _CutReply(Struct):
    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: dict[str, Any] = field(default_factory=dict)


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
                return 200, await self._generate(msgspec.json.decode(body, type=_GenerateRequest))
        raise HTTPException(404, "no such route")

    async def _generate(self, request: _GenerateRequest) -> bytes:
        sampling = request.sampling_params
        self.ignored_grammars.update(
            name for name in GRAMMAR_NAMES if getattr(sampling, name) is not None
        )
        question = EngineQuestion(
            request.input_ids,
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.sampling_seed or 0,
        )
        reply = self._cut_at_stop(await self._replies.answer(question), sampling)
        encoded = msgspec.json.encode(_build_generate_reply(request, reply))
        if not request.stream:
            return encoded
        return b"data: " + encoded + b"\n\ndata: [DONE]\n\n"

    def _cut_at_stop(self, reply: EngineReply, sampling: _SamplingParams) -> _CutReply:
        ids, logprobs = reply.token_ids, reply.logprobs
        end_ids = {self._end_id, *(sampling.stop_token_ids or ())}
        count = next((at for at, one in enumerate(ids) if one in end_ids), None)
        reason: dict[str, Any] = {"type": "length", "length": len(ids)}
        text_ids = ids
        if count is not None:
            reason = {"type": "stop", "matched": ids[count]}
            text_ids, ids, logprobs = ids[:count], ids[: count + 1], logprobs[: count + 1]
        text = self._decode(text_ids)
        for stop in sampling.stop or ():
            if stop in text:
                count = next(
                    (
                        end
                        for end in range(1, len(text_ids))
                        if stop in self._decode(text_ids[:end])
                    ),
                    len(text_ids),
                )
                ids, logprobs = ids[:count], logprobs[:count]
                text_ids, text = ids, text[: text.index(stop)]
                reason = {"type": "stop", "matched": stop}
        return _CutReply(text, ids, logprobs, reason)

    def _decode(self, ids: list[int]) -> str:
        return self._encoder.decode(ids, skip_special_tokens=True)


def _build_generate_reply(request: _GenerateRequest, reply: _CutReply) -> dict[str, Any]:
    count = len(reply.token_ids)
    logprobs = [
        (logprob, token, None)
        for logprob, token in zip(reply.logprobs, reply.token_ids, strict=True)
    ]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": reply.finish_reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": count,
        "cached_tokens": 0,
        "output_token_logprobs": logprobs,
        "weight_version": WEIGHT_VERSION,
        "weight_versions": [{"version": WEIGHT_VERSION, "start": 0, "end": count}],
    }
    if request.top_logprobs_num:
        meta["output_top_logprobs"] = [[one] for one in logprobs]
    return {"text": reply.text, "output_ids": reply.token_ids, "meta_info": meta}

"""`/tokenize` and `/detokenize` routes, as in SGLang."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.prompts import PromptBuilder
from areal_hpc.proxy.dialects.chat import (
    ChatMessage,
    build_tool_schemas,
    normalize_messages,
)
from areal_hpc.proxy.dialects.validation import check_token_ids
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.session.tree import format_ids_as_json_inside


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    model: str = ""
    tools: list[msgspec.Raw] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Of a text: with the tokens that the tokenizer puts around texts; true when left out."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = True


async def tokenize(
    prompts: PromptBuilder, model: ServedModel, session: Session, request: TokenizeRequest
) -> bytes:
    if (request.prompt is None) == (request.messages is None):
        raise ProxyRequestError(400, "give either a prompt or messages", key="prompt")
    if request.messages is not None and request.add_special_tokens is not None:
        problem = "add_special_tokens cannot be set with messages: the chat template decides"
        raise ProxyRequestError(400, problem, key="add_special_tokens")
    if request.prompt is not None and (request.tools or request.chat_template_kwargs):
        key = "tools" if request.tools else "chat_template_kwargs"
        raise ProxyRequestError(400, f"{key} go with messages", key=key)
    if request.prompt is not None:
        with_special = request.add_special_tokens is not False
        ids = await prompts.encode(request.prompt, "prompt", add_special_tokens=with_special)
        ids_json, count = format_ids_as_json_inside(ids), len(ids)
    else:
        call = ModelCall(
            messages=normalize_messages(request.messages or []),
            tools=build_tool_schemas(request.tools, [], []) or None,
            template_variables=request.chat_template_kwargs or None,
            sampling=SamplingParams(1.0, 0),
        )
        ids_json, count = await prompts.build_prompt(session, call)
    tokens = msgspec.Raw(b"[" + ids_json + b"]")
    reply = {"tokens": tokens, "count": count, "max_model_len": model.context_tokens}
    return msgspec.json.encode(reply)


def detokenize(model: ServedModel, session: Session, request: DetokenizeRequest) -> bytes:
    if len(request.tokens) > model.context_tokens:
        problem = f"expected at most {model.context_tokens} tokens, got {len(request.tokens)}"
        raise ProxyRequestError(400, problem, key="tokens")
    check_token_ids(model, "tokens", request.tokens)
    skip = request.skip_special_tokens
    return msgspec.json.encode(
        {"text": model.encoder.decode(request.tokens, skip_special_tokens=skip)}
    )

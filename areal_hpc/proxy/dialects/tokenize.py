"""`/tokenize` and `/detokenize` routes, as in SGLang."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from areal_hpc.errors import RequestError
from areal_hpc.proxy.dialects.openai.chat_request import (
    ChatMessage,
    require_text_only,
    validate_tools,
)
from areal_hpc.proxy.dialects.validation import check_token_ids, decode
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.session.message_matching import normalize_chat_message


class TokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    model: str = ""
    tools: list[msgspec.Raw] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Of a text: with the tokens that the tokenizer puts around texts; true when left out."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[int]
    model: str = ""
    skip_special_tokens: bool = True


_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)


def parse_tokenize(body: bytes) -> TokenizeRequest:
    """Validate a request.

    Raises:
        RequestError: 400, naming the parameter that is wrong.
    """
    request = decode(_decoder, body)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(400, "give either a prompt or messages", key="prompt")
    if request.messages is not None and request.add_special_tokens is not None:
        problem = "add_special_tokens cannot be set with messages: the chat template decides"
        raise RequestError(400, problem, key="add_special_tokens")
    if request.prompt is not None and (request.tools or request.chat_template_kwargs):
        key = "tools" if request.tools else "chat_template_kwargs"
        raise RequestError(400, f"{key} go with messages", key=key)
    return request


def build_chat_call(request: TokenizeRequest) -> ModelCall:
    """The chat completion whose prompt is asked for.

    Raises:
        RequestError: 400, naming the message or the tool that is wrong.
    """
    messages = request.messages or []
    require_text_only(messages)
    return ModelCall(
        messages=[normalize_chat_message(msgspec.to_builtins(one)) for one in messages],
        tools=validate_tools(request.tools or []) or None,
        variables=request.chat_template_kwargs or None,
        sampling=SamplingParams(1.0, 0),
    )


def format_tokenize_reply(ids_json: bytes, count: int, model: ServedModel) -> bytes:
    """The reply to a tokenize request.

    Args:
        ids_json: Token ids, the inside of a JSON array.
        count: How many they are.
        model: Whose they are.
    """
    tokens = msgspec.Raw(b"[" + ids_json + b"]")
    reply = {"tokens": tokens, "count": count, "max_model_len": model.context_tokens}
    return msgspec.json.encode(reply)


def detokenize(body: bytes, model: ServedModel) -> bytes:
    """The reply to a detokenize request.

    Raises:
        RequestError: 400, naming the parameter that is wrong.
    """
    request = decode(_detokenize_decoder, body)
    check_token_ids(model, "tokens", request.tokens)
    skip = request.skip_special_tokens
    return msgspec.json.encode(
        {"text": model.encoder.decode(request.tokens, skip_special_tokens=skip)}
    )

"""Routes for agents: model calls in every dialect, tokens, models, stored Responses."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.prompts import (
    apply_enforced_sampling,
    bound_top_k,
    enforce_sampling,
    zero_tiny_temperature,
)
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.dialects import responses_stored
from areal_hpc.proxy.dialects.anthropic import MESSAGES_DIALECT
from areal_hpc.proxy.dialects.chat import CHAT_DIALECT, ChatRequest
from areal_hpc.proxy.dialects.completions import COMPLETIONS_DIALECT
from areal_hpc.proxy.dialects.dialect import Dialect, Exchange
from areal_hpc.proxy.dialects.google import (
    CountTokensRequest,
    GenerateContentRequest,
)
from areal_hpc.proxy.dialects.google_reply import (
    Delivery,
    GenerateContentExchange,
    build_model_card,
)
from areal_hpc.proxy.dialects.google_reply import format_error as format_google_error
from areal_hpc.proxy.dialects.openai import format_model, format_models
from areal_hpc.proxy.dialects.responses import RESPONSES_DIALECT
from areal_hpc.proxy.dialects.sglang import (
    DetokenizeRequest,
    GenerateBody,
    TokenizeRequest,
    build_generate_request,
    detokenize,
    tokenize,
)
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.http.routes import ModelAnswer, Route
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.wire.trajectory import CallFacts

DIALECT_BY_ROUTE = {
    "/chat/completions": CHAT_DIALECT,
    "/completions": COMPLETIONS_DIALECT,
    "/messages": MESSAGES_DIALECT,
    "/responses": RESPONSES_DIALECT,
}
TOKEN_COUNT_SUFFIX_BY_PATH = {"/messages": "count_tokens", "/responses": "input_tokens"}
"""Last parts of the paths that return the number of tokens of a request."""


GOOGLE_PREFIXES = ("/v1beta", "/v1", "/v1alpha")
"""Versions of Google's API that its SDKs request; all are served alike."""
_GOOGLE_ONLY_PREFIXES = ("/v1beta/", "/v1alpha/")
"""Prefixes that no other dialect has."""
_MODEL = "/models/{model}:"
_GENERATE, _STREAM, _COUNT = ("generateContent", "streamGenerateContent", "countTokens")
_GOOGLE_ONLY_PATH_ENDS = tuple(f":{verb}" for verb in (_GENERATE, _STREAM, _COUNT))


def find_google_key(
    asgi_scope: MutableMapping[str, Any], request_headers: Mapping[bytes, bytes]
) -> str | None:
    """Return the key of a request in Google's dialect; None for another dialect.

    On a path of several dialects, `/v1/models`, a key in Google's header or query decides.
    """
    path: str = asgi_scope["path"]
    key = request_headers.get(b"x-goog-api-key", b"").decode("latin-1")
    if not key and "/models" in path:
        key = read_query_parameters(asgi_scope).get("key", "")
    is_google_only = path.startswith(_GOOGLE_ONLY_PREFIXES) or path.endswith(_GOOGLE_ONLY_PATH_ENDS)
    return key if key or is_google_only else None


def read_query_parameters(asgi_scope: MutableMapping[str, Any]) -> dict[str, str]:
    text: bytes = asgi_scope["query_string"]
    return dict(parse_qsl(text.decode("latin-1")))


class AgentApi:
    def __init__(self, model: ServedModel, completions: CompletionService) -> None:
        self._model = model
        self._completions = completions

    def list_routes(self) -> Iterator[Route]:
        """Yield each route with and without `/v1`: the base URLs of SDKs differ in it."""
        forward, body = self._forward_generate, GenerateBody
        yield Route("POST", "/generate", "session", forward, body, needs_client_that_records=True)
        for route in self._list_unversioned_routes():
            for prefix in ("", "/v1"):
                yield replace(route, path=prefix + route.path)

    def _list_unversioned_routes(self) -> Iterator[Route]:
        for path, dialect in DIALECT_BY_ROUTE.items():
            tolerant = Route(
                "POST",
                path,
                "session",
                partial(self._answer_dialect, path, dialect),
                dialect.request,
                error_formatter=dialect.error_formatter,
                passes_unknown_params=True,
                takes_facts=True,
            )
            yield replace(
                tolerant,
                streams=True,
                calls_model=True,
                repeats_messages=dialect.request is ChatRequest,
            )
            if path in TOKEN_COUNT_SUFFIX_BY_PATH:
                count_path = f"{path}/{TOKEN_COUNT_SUFFIX_BY_PATH[path]}"
                answer: Callable[..., Any] = partial(self._count_tokens, count_path, dialect)
                yield replace(tolerant, path=count_path, answer=answer)
        answer = partial(tokenize, self._completions.prompts, self._model)
        yield Route("POST", "/tokenize", "session", answer, TokenizeRequest, takes_facts=True)
        answer = partial(detokenize, self._model)
        yield Route("POST", "/detokenize", "session", answer, DetokenizeRequest)
        name, most = self._model.name, self._model.context_tokens
        models = Route(
            "GET",
            "/models",
            "session",
            lambda session: format_models(name, most),
            is_open_after_session_end=True,
        )
        yield models
        yield replace(
            models,
            path="/models/{model}",
            answer=lambda session, model_name, query: format_model(model_name, most),
        )
        response = "/responses/{response_id}"
        yield Route("GET", response, "session", responses_stored.retrieve_response)
        yield Route("DELETE", response, "session", responses_stored.delete_response)
        input_items = f"{response}/input_items"
        yield Route("GET", input_items, "session", responses_stored.encode_input_items)
        cancel = f"{response}/cancel"
        yield Route("POST", cancel, "session", responses_stored.refuse_cancellation)
        yield Route("POST", "/responses/compact", "session", responses_stored.refuse_compaction)

    def list_google_routes(self) -> Iterator[Route]:
        """Yield the routes of Google's dialect, which have paths and keys of their own."""
        common: dict[str, Any] = {"opened_by": "session", "error_formatter": format_google_error}
        calls = {**common, "method": "POST", "takes_query": True}
        calls |= {"passes_unknown_params": True, "takes_facts": True}
        lists = {**common, "method": "GET", "is_open_after_session_end": True}
        model = self._model

        def list_models(session: Session) -> bytes:
            return msgspec.json.encode({"models": [build_model_card(model.name, model)]})

        def show_model(session: Session, model_name: str, query: Mapping[str, str]) -> bytes:
            return msgspec.json.encode(build_model_card(model_name, model))

        for prefix in GOOGLE_PREFIXES:
            for verb in (_GENERATE, _STREAM):
                more: dict[str, Any] = (
                    {"streams": True, "json_type": "array"} if verb == _STREAM else {}
                )
                yield Route(
                    path=prefix + _MODEL + verb,
                    answer=partial(self._answer_google, verb),
                    request=GenerateContentRequest,
                    calls_model=True,
                    **calls,
                    **more,
                )
            count = self._count_google_tokens
            yield Route(
                path=prefix + _MODEL + _COUNT, answer=count, request=CountTokensRequest, **calls
            )
            yield Route(path=prefix + "/models", answer=list_models, **lists)
            yield Route(path=prefix + "/models/{model}", answer=show_model, **lists)

    # Steps of all dialects -------------------------------------------------------------------

    async def _answer_call(
        self, route: str, session: Session, exchange: Exchange, *more: Any
    ) -> ModelAnswer:
        call = exchange.call = self._enforce_sampling(route, session, exchange, *more)
        if exchange.streams:
            reply_stream = await self._completions.stream(session, call, exchange.answer_id)
            return ModelAnswer(exchange, reply_stream)
        choices = await self._completions.answer(session, call, exchange.answer_id)
        return ModelAnswer(exchange, exchange.format_reply(choices))

    async def _count_prompt_tokens(
        self, route: str, session: Session, exchange: Exchange, *more: Any
    ) -> int:
        call = self._enforce_sampling(route, session, exchange, *more)
        return (await self._completions.prompts.build_prompt(session, call))[1]

    def _enforce_sampling(
        self,
        route: str,
        session: Session,
        exchange: Exchange,
        unknown_params: Sequence[str],
        facts: CallFacts,
    ) -> ModelCall:
        call = enforce_sampling(exchange.call, session.request, unknown_params, facts)
        if names := call.ignored_names:
            self._completions.metrics.count_ignored_parameters(route, session.client, names)
        return call

    # Routes ---------------------------------------------------------------------------------

    async def _answer_dialect(
        self, path: str, dialect: Dialect, session: Session, request: msgspec.Struct, *more: Any
    ) -> ModelAnswer:
        exchange = dialect.read(request, session, self._model)
        return await self._answer_call(path, session, exchange, *more)

    async def _count_tokens(
        self, path: str, dialect: Dialect, session: Session, request: msgspec.Struct, *more: Any
    ) -> bytes:
        exchange = dialect.read(request, session, self._model)
        count = await self._count_prompt_tokens(path, session, exchange, *more)
        kind = {"object": "response.input_tokens"} if path.startswith("/responses") else {}
        return msgspec.json.encode({**kind, "input_tokens": count})

    async def _forward_generate(self, session: Session, body: GenerateBody) -> bytes:
        request = build_generate_request(body, self._model)
        sampling, replaced = apply_enforced_sampling(request.sampling, session.request)
        self._completions.metrics.count_ignored_parameters("/generate", session.client, replaced)
        sampling, records_sampling_mask = bound_top_k(
            zero_tiny_temperature(sampling), session.request, self._model.encoder.vocab_size
        )
        request = msgspec.structs.replace(
            request, sampling=sampling, records_sampling_mask=records_sampling_mask
        )
        return await self._completions.generate_unrecorded(session, request)

    async def _answer_google(
        self,
        verb: str,
        session: Session,
        query: Mapping[str, str],
        request: GenerateContentRequest,
        *more: Any,
    ) -> ModelAnswer:
        delivery = _read_delivery(query)
        exchange = GenerateContentExchange(
            request, session, self._model, delivery if verb == _STREAM else "whole"
        )
        return await self._answer_call(_MODEL + verb, session, exchange, *more)

    async def _count_google_tokens(
        self, session: Session, query: Mapping[str, str], request: CountTokensRequest, *more: Any
    ) -> bytes:
        whole = request.get_whole_request()
        exchange = GenerateContentExchange(whole, session, self._model, "whole")
        count = await self._count_prompt_tokens(_MODEL + _COUNT, session, exchange, *more)
        return msgspec.json.encode({"totalTokens": count})


def _read_delivery(query: Mapping[str, str]) -> Delivery:
    form = query.get("alt", "json")
    if form not in ("json", "sse"):
        raise ProxyRequestError(400, f"expected alt=json or alt=sse, got {form!r}", key="alt")
    return "events" if form == "sse" else "array"

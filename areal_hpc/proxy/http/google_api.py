"""Routes of Google's dialect, which share paths and keys with no other."""

from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.dialects.google.reply import (
    Delivery,
    GenerateContentExchange,
    build_model_card,
    format_error,
)
from areal_hpc.proxy.dialects.google.request import (
    CountTokensRequest,
    GenerateContentRequest,
    build_model_call,
)
from areal_hpc.proxy.dialects.google.spelling import spell_in_camel_case
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.http.routes import Route, RouteResult, Routes
from areal_hpc.proxy.sessions.store import Session

GOOGLE_PREFIXES = ("/v1beta", "/v1", "/v1alpha")
"""Versions of Google's API that its SDKs ask for; what is served is the same."""
_OWN_PREFIXES = ("/v1beta/", "/v1alpha/")
"""Those that no other dialect has."""
_GENERATE, _STREAM, _COUNT = ("generateContent", "streamGenerateContent", "countTokens")
_OWN_ENDS = tuple(f":{verb}" for verb in (_GENERATE, _STREAM, _COUNT))


def read_google_key(scope: MutableMapping[str, Any]) -> str | None:
    """The key of a request in Google's dialect; None if it is in another.

    Of paths that others have too, `/v1/models`, the place of the key tells.
    """
    path: str = scope["path"]
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    key = next((value for name, value in headers if name == b"x-goog-api-key"), b"").decode(
        "latin-1"
    )
    if not key and "/models" in path:
        key = read_query(scope).get("key", "")
    is_own = path.startswith(_OWN_PREFIXES) or path.endswith(_OWN_ENDS)
    return key if key or is_own else None


def read_query(scope: MutableMapping[str, Any]) -> dict[str, str]:
    """The parameters behind a path."""
    text: bytes = scope["query_string"]
    return dict(parse_qsl(text.decode("latin-1")))


class GoogleApi:
    """Answers agents that speak Google's dialect."""

    def __init__(self, model: ServedModel, completions: CompletionService) -> None:
        self._model = model
        self._completions = completions

    def build_routes(self) -> Routes:
        """The routes, under every version."""
        return Routes(self._list_routes(), format_error)

    def _list_routes(self) -> Iterator[Route]:
        def post(path: str, answer: Any, request: type[msgspec.Struct], **more: Any) -> Route:
            return Route(
                "POST",
                path,
                "session",
                answer,
                request,
                partial(spell_in_camel_case, form=request),
                takes_query=True,
                refused=format_error,
                ignores_unknown=True,
                **more,
            )

        def get(path: str, answer: Any) -> Route:
            more: dict[str, Any] = {"refused": format_error, "when_ended": True}
            return Route("GET", path, "session", answer, takes_query=True, **more)

        for prefix in GOOGLE_PREFIXES:
            named = prefix + "/models/{model}:"
            yield post(named + _GENERATE, self._generate, GenerateContentRequest)
            yield post(
                named + _STREAM,
                self._stream,
                GenerateContentRequest,
                streams=True,
                json_type="array",
            )
            yield post(named + _COUNT, self._count_tokens, CountTokensRequest)
            yield get(prefix + "/models", self._list_models)
            yield get(prefix + "/models/{model...}", self._get_model)

    async def _generate(
        self, session: Session, query: Mapping[str, str], request: GenerateContentRequest
    ) -> RouteResult:
        _read_delivery(query)
        exchange = self._read(_GENERATE, session, request, "whole")
        call, answer_id = exchange.call, exchange.answer_id
        return exchange.format_reply(await self._completions.answer(session, call, answer_id))

    async def _stream(
        self, session: Session, query: Mapping[str, str], request: GenerateContentRequest
    ) -> RouteResult:
        exchange = self._read(_STREAM, session, request, _read_delivery(query))
        call, answer_id = exchange.call, exchange.answer_id
        return exchange, await self._completions.stream(session, call, answer_id)

    def _read(
        self, verb: str, session: Session, request: GenerateContentRequest, delivery: Delivery
    ) -> GenerateContentExchange:
        exchange = GenerateContentExchange(request, session, self._model, delivery)
        self._count_ignored(verb, exchange.call.ignored)
        return exchange

    async def _count_tokens(
        self, session: Session, query: Mapping[str, str], request: CountTokensRequest
    ) -> bytes:
        whole = request.build_whole_request()
        call = build_model_call(whole, session.request.sampling, self._model)
        self._count_ignored(_COUNT, call.ignored)
        _, count = await self._completions.prompts.build_prompt_json(session, call)
        return msgspec.json.encode({"totalTokens": count})

    def _count_ignored(self, verb: str, names: Any) -> None:
        self._completions.metrics.count_ignored_parameters("/models/{model}:" + verb, names)

    def _list_models(self, session: Session, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode({"models": [build_model_card(self._model.name, self._model)]})

    def _get_model(self, session: Session, query: Mapping[str, str], name: str) -> bytes:
        return msgspec.json.encode(build_model_card(name, self._model))


def _read_delivery(query: Mapping[str, str]) -> Delivery:
    form = query.get("alt", "json")
    if form not in ("json", "sse"):
        raise ProxyRequestError(400, f"expected alt=json or alt=sse, got {form!r}", key="alt")
    return "events" if form == "sse" else "array"

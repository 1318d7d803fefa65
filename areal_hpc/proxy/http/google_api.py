"""Routes of Google's dialect, which share paths and keys with no other."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.completion.sampling_rule import enforce_sampling_and_note_ignored
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
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.http.routes import ModelAnswer, Route, RouteResult
from areal_hpc.proxy.sessions.store import Session

GOOGLE_PREFIXES = ("/v1beta", "/v1", "/v1alpha")
"""Versions of Google's API that its SDKs ask for; what is served is the same."""
_GOOGLE_ONLY_PREFIXES = ("/v1beta/", "/v1alpha/")
"""Those that no other dialect has."""
_GENERATE, _STREAM, _COUNT = ("generateContent", "streamGenerateContent", "countTokens")
_GOOGLE_ONLY_PATH_ENDS = tuple(f":{verb}" for verb in (_GENERATE, _STREAM, _COUNT))


def find_key_if_google_dialect(asgi_scope: MutableMapping[str, Any]) -> str | None:
    """The key of a request in Google's dialect; None if it is in another.

    Of paths that others have too, `/v1/models`, the place of the key tells.
    """
    path: str = asgi_scope["path"]
    headers: list[tuple[bytes, bytes]] = asgi_scope["headers"]
    key = next((value for name, value in headers if name == b"x-goog-api-key"), b"").decode(
        "latin-1"
    )
    if not key and "/models" in path:
        key = read_query_parameters(asgi_scope).get("key", "")
    is_own = path.startswith(_GOOGLE_ONLY_PREFIXES) or path.endswith(_GOOGLE_ONLY_PATH_ENDS)
    return key if key or is_own else None


def read_query_parameters(asgi_scope: MutableMapping[str, Any]) -> dict[str, str]:
    """The parameters behind a path."""
    text: bytes = asgi_scope["query_string"]
    return dict(parse_qsl(text.decode("latin-1")))


class GoogleApi:
    """Answers agents that speak Google's dialect."""

    def __init__(self, model: ServedModel, completions: CompletionService) -> None:
        self._model = model
        self._completions = completions

    def list_routes(self) -> Iterator[Route]:
        """The routes, under every version."""

        def post(path: str, answer: Any, request: type[msgspec.Struct], **more: Any) -> Route:
            return Route(
                "POST",
                path,
                "session",
                answer,
                request,
                partial(spell_in_camel_case, request_type=request),
                takes_query=True,
                error_formatter=format_error,
                passes_unknown_params=True,
                **more,
            )

        def get(path: str, answer: Any) -> Route:
            more: dict[str, Any] = {
                "error_formatter": format_error,
                "is_open_after_session_end": True,
            }
            return Route("GET", path, "session", answer, **more)

        for prefix in GOOGLE_PREFIXES:
            named = prefix + "/models/{model}:"
            yield post(
                named + _GENERATE,
                self._answer_generate_content,
                GenerateContentRequest,
                asks_model=True,
            )
            yield post(
                named + _STREAM,
                self._answer_stream_generate_content,
                GenerateContentRequest,
                streams=True,
                asks_model=True,
                json_type="array",
            )
            yield post(named + _COUNT, self._count_tokens, CountTokensRequest)
            yield get(prefix + "/models", self._list_models)
            yield get(prefix + "/models/{model}", self._get_model)

    async def _answer_generate_content(
        self,
        session: Session,
        query: Mapping[str, str],
        request: GenerateContentRequest,
        unknown_params: Sequence[str],
        is_retry: bool,
    ) -> RouteResult:
        _read_delivery(query)
        exchange = GenerateContentExchange(request, session, self._model, "whole")
        call = exchange.call = self._enforce_sampling_and_count_ignored(
            _GENERATE, session, exchange.call, unknown_params
        )
        call = msgspec.structs.replace(call, is_retry=is_retry)
        answers = await self._completions.answer(session, call, exchange.answer_id)
        return ModelAnswer(exchange, exchange.format_reply(answers))

    async def _answer_stream_generate_content(
        self,
        session: Session,
        query: Mapping[str, str],
        request: GenerateContentRequest,
        unknown_params: Sequence[str],
        is_retry: bool,
    ) -> RouteResult:
        exchange = GenerateContentExchange(request, session, self._model, _read_delivery(query))
        call = exchange.call = self._enforce_sampling_and_count_ignored(
            _STREAM, session, exchange.call, unknown_params
        )
        call = msgspec.structs.replace(call, is_retry=is_retry)
        live = await self._completions.stream(session, call, exchange.answer_id)
        return ModelAnswer(exchange, live)

    async def _count_tokens(
        self,
        session: Session,
        query: Mapping[str, str],
        request: CountTokensRequest,
        unknown_params: Sequence[str],
    ) -> bytes:
        whole = request.build_whole_request()
        requested_call = build_model_call(whole, session.request.sampling, self._model)
        call = self._enforce_sampling_and_count_ignored(
            _COUNT, session, requested_call, unknown_params
        )
        _, count = await self._completions.prompts.build_prompt_json_inside_and_length(
            session, call
        )
        return msgspec.json.encode({"totalTokens": count})

    def _enforce_sampling_and_count_ignored(
        self, verb: str, session: Session, requested_call: ModelCall, unknown_params: Sequence[str]
    ) -> ModelCall:
        """A call as its session allows it; what it asks for in vain is counted."""
        call = enforce_sampling_and_note_ignored(requested_call, session.request, unknown_params)
        route, names = f"/models/{{model}}:{verb}", call.ignored_names_and_dropped_tools
        self._completions.metrics.count_ignored_parameters(route, session.client, names)
        return call

    def _list_models(self, session: Session) -> bytes:
        return msgspec.json.encode({"models": [build_model_card(self._model.name, self._model)]})

    def _get_model(self, session: Session, model_name: str, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(build_model_card(model_name, self._model))


def _read_delivery(query: Mapping[str, str]) -> Delivery:
    form = query.get("alt", "json")
    if form not in ("json", "sse"):
        raise ProxyRequestError(400, f"expected alt=json or alt=sse, got {form!r}", key="alt")
    return "events" if form == "sse" else "array"

"""Routes of Google's dialect, which share paths and keys with no other."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.dialects.google.reply import (
    Delivery,
    GenerateContentExchange,
    build_model_card,
    format_error,
)
from areal_hpc.proxy.dialects.google.request import (
    CountTokensRequest,
    GenerateContentRequest,
)
from areal_hpc.proxy.dialects.google.spelling import spell_in_camel_case
from areal_hpc.proxy.http.agent_api import ModelApi
from areal_hpc.proxy.http.routes import Route, RouteResult
from areal_hpc.proxy.sessions.store import Session

GOOGLE_PREFIXES = ("/v1beta", "/v1", "/v1alpha")
"""Versions of Google's API that its SDKs ask for; what is served is the same."""
_GOOGLE_ONLY_PREFIXES = ("/v1beta/", "/v1alpha/")
"""Those that no other dialect has."""
_MODEL = "/models/{model}:"
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
    text: bytes = asgi_scope["query_string"]
    return dict(parse_qsl(text.decode("latin-1")))


class GoogleApi(ModelApi):
    """Answers agents that speak Google's dialect."""

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
            named = prefix + _MODEL
            in_parts: dict[str, Any] = {"streams": True, "json_type": "array"}
            for verb, more in ((_GENERATE, {}), (_STREAM, in_parts)):
                answer = partial(self._answer, verb)
                yield post(named + verb, answer, GenerateContentRequest, asks_model=True, **more)
            yield post(named + _COUNT, self._count_tokens, CountTokensRequest)
            yield get(prefix + "/models", self._list_models)
            yield get(prefix + "/models/{model}", self._get_model)

    async def _answer(
        self,
        verb: str,
        session: Session,
        query: Mapping[str, str],
        request: GenerateContentRequest,
        *more: Any,
    ) -> RouteResult:
        delivery = _read_delivery(query)
        exchange = GenerateContentExchange(
            request, session, self._model, delivery if verb == _STREAM else "whole"
        )
        return await self.answer_call(_MODEL + verb, session, exchange, *more)

    async def _count_tokens(
        self,
        session: Session,
        query: Mapping[str, str],
        request: CountTokensRequest,
        unknown_params: Sequence[str],
    ) -> bytes:
        whole = request.build_whole_request()
        exchange = GenerateContentExchange(whole, session, self._model, "whole")
        count = await self.count_prompt_tokens(_MODEL + _COUNT, session, exchange, unknown_params)
        return msgspec.json.encode({"totalTokens": count})

    def _list_models(self, session: Session) -> bytes:
        return msgspec.json.encode({"models": [build_model_card(self._model.name, self._model)]})

    def _get_model(self, session: Session, model_name: str, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(build_model_card(model_name, self._model))


def _read_delivery(query: Mapping[str, str]) -> Delivery:
    form = query.get("alt", "json")
    if form not in ("json", "sse"):
        raise ProxyRequestError(400, f"expected alt=json or alt=sse, got {form!r}", key="alt")
    return "events" if form == "sse" else "array"

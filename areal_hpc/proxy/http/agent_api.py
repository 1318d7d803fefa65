"""Routes for agents: the model in every dialect, its name, its tokens, what it said before."""

from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
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
from areal_hpc.proxy.dialects import openai as openai_format
from areal_hpc.proxy.dialects import responses_stored as stored
from areal_hpc.proxy.dialects import tokenize
from areal_hpc.proxy.dialects.anthropic import MESSAGES_DIALECT
from areal_hpc.proxy.dialects.chat import CHAT_DIALECT
from areal_hpc.proxy.dialects.completions import COMPLETIONS_DIALECT
from areal_hpc.proxy.dialects.dialect import Dialect, Exchange
from areal_hpc.proxy.dialects.generate import GenerateBody, build_generate_request
from areal_hpc.proxy.dialects.google import (
    CountTokensRequest,
    GenerateContentRequest,
)
from areal_hpc.proxy.dialects.google_reply import (
    Delivery,
    GenerateContentExchange,
    build_model_card,
    format_error,
)
from areal_hpc.proxy.dialects.google_spelling import spell_in_camel_case
from areal_hpc.proxy.dialects.responses import RESPONSES_DIALECT
from areal_hpc.proxy.engine.model_call import ModelCall, ServedModel
from areal_hpc.proxy.engine.passthrough import GeneratePassthrough
from areal_hpc.proxy.http.routes import ModelAnswer, Route, RouteResult
from areal_hpc.proxy.sessions.store import Session

DIALECT_BY_ROUTE = {
    "/chat/completions": CHAT_DIALECT,
    "/completions": COMPLETIONS_DIALECT,
    "/messages": MESSAGES_DIALECT,
    "/responses": RESPONSES_DIALECT,
}
TOKEN_COUNT_SUFFIX_BY_PATH = {"/messages": "count_tokens", "/responses": "input_tokens"}
"""Last parts of the paths that tell how many tokens a request has."""
Handler = Callable[..., Coroutine[Any, Any, RouteResult]]


class ModelApi:
    """What routes of all dialects do with a request that has been read."""

    def __init__(self, model: ServedModel, completions: CompletionService) -> None:
        self._model = model
        self._completions = completions

    async def answer_call(
        self,
        route: str,
        session: Session,
        exchange: Exchange,
        unknown_params: Sequence[str],
        is_retry: bool,
    ) -> ModelAnswer:
        """What the model says, whole or as it comes."""
        call = self._enforce_sampling_and_count_ignored(route, session, exchange, unknown_params)
        call = exchange.call = msgspec.structs.replace(call, is_retry=is_retry)
        if exchange.streams:
            live = await self._completions.stream(session, call, exchange.answer_id)
            return ModelAnswer(exchange, live)
        answers = await self._completions.answer(session, call, exchange.answer_id)
        return ModelAnswer(exchange, exchange.format_reply(answers))

    async def count_prompt_tokens(
        self, route: str, session: Session, exchange: Exchange, unknown_params: Sequence[str]
    ) -> int:
        call = self._enforce_sampling_and_count_ignored(route, session, exchange, unknown_params)
        prompts = self._completions.prompts
        return (await prompts.build_prompt(session, call))[1]

    def _enforce_sampling_and_count_ignored(
        self, route: str, session: Session, exchange: Exchange, unknown_params: Sequence[str]
    ) -> ModelCall:
        call = enforce_sampling(exchange.call, session.request, unknown_params)
        names = call.ignored_names
        self._completions.metrics.count_ignored_parameters(route, session.client, names)
        return call


class AgentApi(ModelApi):
    """Answers agents. Without a passthrough there is no `/generate`."""

    def __init__(
        self,
        model: ServedModel,
        completions: CompletionService,
        passthrough: GeneratePassthrough | None,
    ) -> None:
        super().__init__(model, completions)
        self._passthrough = passthrough

    def list_routes(self) -> Iterator[Route]:
        """The routes, each with and without `/v1`: SDKs differ in whether an address has it."""
        yield Route(
            "POST",
            "/generate",
            "session",
            self._forward_generate,
            GenerateBody,
            needs_client_that_records=True,
        )
        for route in self._list_unversioned_routes():
            for prefix in ("", "/v1"):
                yield replace(route, path=prefix + route.path)

    def _list_unversioned_routes(self) -> Iterator[Route]:
        for path, dialect in DIALECT_BY_ROUTE.items():
            said = Route(
                "POST",
                path,
                "session",
                self._build_model_call_handler(path, dialect),
                dialect.request,
            )
            tolerant = replace(
                said, error_formatter=dialect.error_formatter, passes_unknown_params=True
            )
            yield replace(tolerant, streams=True, asks_model=True)
            if path in TOKEN_COUNT_SUFFIX_BY_PATH:
                below = f"{path}/{TOKEN_COUNT_SUFFIX_BY_PATH[path]}"
                yield replace(
                    tolerant, path=below, answer=self._build_token_counter(below, dialect)
                )
        answer: Callable[..., Any] = partial(
            tokenize.tokenize, self._completions.prompts, self._model
        )
        yield Route("POST", "/tokenize", "session", answer, tokenize.TokenizeRequest)
        answer = partial(tokenize.detokenize, self._model)
        yield Route("POST", "/detokenize", "session", answer, tokenize.DetokenizeRequest)
        yield Route("GET", "/models", "session", self._list_models, is_open_after_session_end=True)
        yield Route(
            "GET", "/models/{model}", "session", self._show_model, is_open_after_session_end=True
        )
        answer = partial(stored.retrieve_response, self._model)
        yield Route("GET", "/responses/{response_id}", "session", answer)
        answer = partial(stored.hide_deleted_response, self._completions.recorder)
        yield Route("DELETE", "/responses/{response_id}", "session", answer)
        answer = stored.encode_input_items
        yield Route("GET", "/responses/{response_id}/input_items", "session", answer)
        answer = stored.refuse_cancellation
        yield Route("POST", "/responses/{response_id}/cancel", "session", answer)
        yield Route("POST", "/responses/compact", "session", stored.refuse_compaction)

    async def _forward_generate(self, session: Session, body: GenerateBody) -> bytes:
        if self._passthrough is None:
            raise ProxyRequestError(404, "there is no route /generate")
        request = build_generate_request(body, self._model)
        sampling, replaced = apply_enforced_sampling(request.sampling, session.request)
        self._completions.metrics.count_ignored_parameters("/generate", session.client, replaced)
        sampling, records_sampling_mask = bound_top_k(
            zero_tiny_temperature(sampling),
            session.request,
            self._model.encoder.vocab_size,
        )
        request = msgspec.structs.replace(
            request, sampling=sampling, records_sampling_mask=records_sampling_mask
        )
        return await self._passthrough.generate(session, request)

    def _list_models(self, session: Session) -> bytes:
        return openai_format.format_models(self._model.name, self._model.context_tokens)

    def _show_model(self, session: Session, model_name: str, query: Mapping[str, str]) -> bytes:
        return openai_format.format_model(model_name, self._model.context_tokens)

    def _build_token_counter(self, path: str, dialect: Dialect) -> Handler:
        async def answer(
            session: Session, request: msgspec.Struct, unknown_params: Sequence[str]
        ) -> RouteResult:
            exchange = dialect.read(request, session, self._model)
            count = await self.count_prompt_tokens(path, session, exchange, unknown_params)
            kind = {"object": "response.input_tokens"} if path.startswith("/responses") else {}
            return msgspec.json.encode({**kind, "input_tokens": count})

        return answer

    def _build_model_call_handler(self, path: str, dialect: Dialect) -> Handler:
        async def answer(session: Session, request: msgspec.Struct, *more: Any) -> RouteResult:
            exchange = dialect.read(request, session, self._model)
            return await self.answer_call(path, session, exchange, *more)

        return answer


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

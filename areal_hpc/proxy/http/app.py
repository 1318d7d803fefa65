"""ASGI application of the proxy: routes, keys, size limits, errors."""

import asyncio
import hmac
import inspect
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from areal_hpc.errors import ClientDisconnectedError, ProxyRequestError
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.completion.streaming import ReplyStream
from areal_hpc.proxy.dialects import tokenize
from areal_hpc.proxy.dialects.anthropic import request as anthropic_request
from areal_hpc.proxy.dialects.anthropic.reply import MESSAGES_DIALECT
from areal_hpc.proxy.dialects.dialect import Dialect, Exchange, FormatError
from areal_hpc.proxy.dialects.generate import GenerateBody, build_generate_request
from areal_hpc.proxy.dialects.openai import format as openai_format
from areal_hpc.proxy.dialects.openai.chat import CHAT_DIALECT
from areal_hpc.proxy.dialects.openai.completions import COMPLETIONS_DIALECT
from areal_hpc.proxy.dialects.openai_responses import reply as responses
from areal_hpc.proxy.dialects.validation import decode_json
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.passthrough import GeneratePassthrough
from areal_hpc.proxy.http.driver_api import DriverApi
from areal_hpc.proxy.http.google_api import GoogleApi, read_google_key, read_query
from areal_hpc.proxy.http.routes import Route, RouteResult, Routes, render_openapi
from areal_hpc.proxy.sessions.store import Session, SessionStore
from areal_hpc.wire import proxy as wire
from areal_hpc.wire.http_server import ByteBudget

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""When a request that came at a busy moment (429) may be repeated."""

MAX_BODIES_AT_ONCE, MAX_BODIES_OF_SESSION = 8, 2
"""Requests of the largest size that are received at a time; of small ones there may be more."""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's: the next message from the client. After the request's body only its disconnect comes."""
Result = TypeVar("Result")

DIALECT_BY_ROUTE = {
    "/chat/completions": CHAT_DIALECT,
    "/completions": COMPLETIONS_DIALECT,
    "/messages": MESSAGES_DIALECT,
    "/responses": responses.RESPONSES_DIALECT,
}
JSON_CONTENT_TYPE, METRICS_CONTENT_TYPE = "application/json", "text/plain; version=0.0.4"


class ProxyApp:
    """Raw ASGI: a framework's routing and response classes would cost more than our own work."""

    def __init__(
        self,
        *,
        admin_key: str,
        max_request_bytes: int,
        model: ServedModel,
        store: SessionStore,
        completions: CompletionService,
        driver_api: DriverApi,
        passthrough: GeneratePassthrough | None = None,
    ) -> None:
        self._admin_key = admin_key.encode()
        self._max_request_bytes = max_request_bytes
        self._body_budget = ByteBudget(MAX_BODIES_AT_ONCE * max_request_bytes)
        self._model = model
        self._store = store
        self._completions = completions
        self._passthrough = passthrough
        completions.metrics.register_gauges(store)
        self._routes = Routes(
            (
                *_list_driver_routes(driver_api),
                Route(
                    "POST",
                    "/generate",
                    "session",
                    self._forward_generate,
                    GenerateBody,
                    for_recording=True,
                ),
                *(  # SDKs differ in whether `/v1` is part of the address they are given
                    replace(route, path=prefix + route.path)
                    for route in self._list_agent_routes()
                    for prefix in ("", "/v1")
                ),
                Route("GET", "/healthz", "anyone", driver_api.get_health),
                Route(
                    "GET",
                    "/metrics",
                    "anyone",
                    completions.metrics.render,
                    form=METRICS_CONTENT_TYPE,
                ),
                Route(
                    "GET",
                    "/openapi.json",
                    "anyone",
                    lambda: render_openapi((*self._google_routes, *self._routes)),
                ),
            )
        )
        self._google_routes = GoogleApi(model, completions).build_routes()

    def _list_agent_routes(self) -> Iterator[Route]:
        for path, dialect in DIALECT_BY_ROUTE.items():
            said = Route(
                "POST", path, "session", self._build_handler(path, dialect), dialect.request
            )
            tolerant = replace(said, refused=dialect.refused, ignores_unknown=True)
            yield replace(tolerant, streams=True)
            if dialect is MESSAGES_DIALECT:
                yield replace(tolerant, path="/messages/count_tokens", answer=self._count_tokens)
        answer: Callable[..., Any] = partial(
            tokenize.tokenize, self._completions.prompts, self._model
        )
        yield Route("POST", "/tokenize", "session", answer, tokenize.TokenizeRequest)
        answer = partial(tokenize.detokenize, self._model)
        yield Route("POST", "/detokenize", "session", answer, tokenize.DetokenizeRequest)
        yield Route("GET", "/models", "session", self._list_models, when_ended=True)
        yield Route("GET", "/responses/{response_id}", "session", responses.retrieve_response)
        yield Route("DELETE", "/responses/{response_id}", "session", responses.delete_response)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        key = read_google_key(scope)
        routes = self._routes if key is None else self._google_routes
        refused: FormatError = routes.refused
        allowed = ""
        try:
            methods, named = routes.find_routes(scope["path"])
            route, key = methods.get(scope["method"]), key or ""
            refused = (route or next(iter(methods.values()))).refused
            if route is None:
                method, path, allowed = scope["method"], scope["path"], ", ".join(methods)
                if _asks_for_websocket(scope):
                    raise ProxyRequestError(
                        426, f"{path} takes {allowed} over HTTP/1.1, no WebSocket"
                    )
                raise ProxyRequestError(405, f"{path} takes {allowed}, not {method}")
            for name, value in scope["headers"]:
                if name == b"authorization" and value[:7].lower() == b"bearer ":
                    key = value[7:].strip().decode("latin-1")
                elif name == b"x-api-key" and not key:
                    key = value.decode("latin-1")
                elif name == b"content-length" and int(value) > self._max_request_bytes:
                    raise self._build_too_large_error()
            session = self._authenticate(route, key)  # without a key no memory for a body
            body = await self._read_body(receive, session) if route.opened_by != "anyone" else b""
            result = route.answer(*self._list_handler_arguments(route, session, named, body, scope))
            if inspect.iscoroutine(result):
                result = await cancel_on_disconnect(receive, result)
            if isinstance(result, tuple):
                await cancel_on_disconnect(receive, _send_events(send, *result))
                return
            content = result if isinstance(result, bytes) else msgspec.json.encode(result)
            status, form = 200, route.form
        except ClientDisconnectedError:
            return
        except Exception as caught:  # boundary: one request's failure must not reach the others
            refusal = _to_request_error(caught)
            status, content, form = refusal.status, refused(refusal), JSON_CONTENT_TYPE
        headers = [
            (b"content-type", form.encode()),
            (b"content-length", str(len(content)).encode()),
        ]
        if status == 405:
            headers.append((b"allow", allowed.encode()))
        if status == 426:  # clients that try a WebSocket first ask over HTTP at once
            headers += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]
        if status == 429:
            headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _build_too_large_error(self) -> ProxyRequestError:
        return ProxyRequestError(413, f"the request exceeds {self._max_request_bytes} bytes")

    async def _read_body(self, receive: Receive, session: Session | None) -> bytes:
        """The request's body; what has come of it counts until all has."""
        parts: list[bytes] = []
        count = 0
        most = MAX_BODIES_OF_SESSION * self._max_request_bytes
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                part: bytes = message.get("body", b"")
                if count + len(part) > self._max_request_bytes:
                    raise self._build_too_large_error()
                if session is not None and session.receiving_bytes + len(part) > most:
                    raise ProxyRequestError(
                        429, f"this session sends more than {most} bytes at a time"
                    )
                if not self._body_budget.try_reserve(len(part)):
                    raise ProxyRequestError(429, "the proxy is receiving too many requests")
                parts.append(part)
                count += len(part)
                if session is not None:
                    session.receiving_bytes += len(part)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self._body_budget.release(count)
            if session is not None:
                session.receiving_bytes -= count

    def _authenticate(self, route: Route, key: str) -> Session | None:
        """The session that a key opens, if the route is one of sessions."""
        if route.opened_by == "admin" and not hmac.compare_digest(
            key.encode("latin-1"), self._admin_key
        ):
            raise ProxyRequestError(401, "this route requires the admin key")
        if route.opened_by in ("admin", "anyone"):
            return None
        if route.opened_by == "session":
            session = self._store.find_session_by_key(key)
        else:
            session = self._store.find_session_by_control_key(key)
            if session is None and self._store.find_session_by_key(key) is not None:
                problem = "this key opens model calls; rewards and the end are its driver's to give"
                raise ProxyRequestError(403, problem)
        if session is None:
            raise ProxyRequestError(401, "invalid session key")
        if route.for_recording and not session.request.records_calls:
            raise ProxyRequestError(
                403, "this session was not opened for a client that records its own calls"
            )
        session.touch()
        return session

    def _list_handler_arguments(
        self, route: Route, session: Session | None, named: str, body: bytes, scope: Scope
    ) -> Iterator[object]:
        """What the route's answer takes."""
        if session is not None:
            if self._store.sessions.get(session.session_id) is not session:  # gone meanwhile
                raise ProxyRequestError(401, "invalid session key")
            if session.ended and not route.when_ended:
                raise ProxyRequestError(403, "the session has ended")
            yield session
        if route.takes_query:
            yield read_query(scope)
        elif named and scope["query_string"]:
            parameter = unquote(scope["query_string"].partition(b"=")[0])
            raise ProxyRequestError(400, "this route takes no parameters", key=parameter)
        if route.rewrite is not None:
            body = route.rewrite(body)
        if named and route.request is None:
            yield named
        elif route.request is not None and route.ignores_unknown and self._model.ignores_unknown:
            unknown: list[str] = []
            yield decode_json(body, route.request, unknown=unknown)
            path = route.label
            self._completions.metrics.count_ignored_parameters(path, unknown)
        elif route.request is not None:
            yield decode_json(body, route.request)

    # Routes -------------------------------------------------------------------------------

    async def _forward_generate(self, session: Session, body: GenerateBody) -> bytes:
        if self._passthrough is None:
            raise ProxyRequestError(404, "there is no route /generate")
        request = build_generate_request(body, self._model)
        return await self._passthrough.generate(session, request)

    def _list_models(self, session: Session) -> bytes:
        return openai_format.format_models(self._model.name, self._model.context_tokens)

    async def _count_tokens(
        self, session: Session, request: anthropic_request.MessagesRequest
    ) -> bytes:
        call = anthropic_request.build_model_call(request, session.request.sampling, self._model)
        self._completions.metrics.count_ignored_parameters("/messages/count_tokens", call.ignored)
        _, count = await self._completions.prompts.build_prompt_json(session, call)
        return msgspec.json.encode({"input_tokens": count})

    def _build_handler(
        self, path: str, dialect: Dialect
    ) -> Callable[[Session, msgspec.Struct], Coroutine[Any, Any, RouteResult]]:
        """Answers model calls in a dialect."""

        async def answer(session: Session, request: msgspec.Struct) -> RouteResult:
            exchange = dialect.read(request, session, self._model)
            call, answer_id = exchange.call, exchange.answer_id
            self._completions.metrics.count_ignored_parameters(path, call.ignored)
            if exchange.streams:
                return exchange, await self._completions.stream(session, call, answer_id)
            return exchange.format_reply(await self._completions.answer(session, call, answer_id))

        return answer


def _list_driver_routes(driver_api: DriverApi) -> tuple[Route, ...]:
    def admin(path: str, answer: Any, request: type[msgspec.Struct] | None = None) -> Route:
        return Route("POST", path, "admin", answer, request)

    return (
        admin("/rl/start_session", driver_api.start_session, wire.StartSessionRequest),
        admin("/rl/offer_episode", driver_api.offer_episode, wire.OfferEpisodeRequest),
        admin("/rl/await_session", driver_api.await_session_end, wire.AwaitSessionRequest),
        admin("/rl/finish_ticket", driver_api.finish_ticket, wire.FinishTicketRequest),
        admin("/rl/keep_failed", driver_api.keep_failed, wire.KeepFailedRequest),
        admin("/rl/seal", driver_api.seal_tickets),
        admin("/export_trajectories", driver_api.export_trajectories, wire.ExportRequest),
        admin("/grant_capacity", driver_api.grant_capacity),
        Route("POST", "/rl/set_reward", "control", driver_api.set_reward, wire.SetRewardRequest),
        Route(
            "POST",
            "/rl/record",
            "control",
            driver_api.record_interactions,
            wire.RecordCallsRequest,
            for_recording=True,
        ),
        Route("POST", "/rl/end_session", "control", driver_api.end_session, when_ended=True),
    )


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; cancels it when the client disconnects first.

    Raises:
        ClientDisconnectedError: It disconnected.
    """
    worker = asyncio.current_task()
    assert worker is not None
    has_disconnected = False

    async def watch() -> None:
        nonlocal has_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        has_disconnected = True
        worker.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not has_disconnected:
            raise
        worker.uncancel()
        raise ClientDisconnectedError from None
    finally:
        watcher.cancel()


def _asks_for_websocket(scope: Scope) -> bool:
    return any(
        name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]
    )


async def _send_events(send: Send, exchange: Exchange, live: ReplyStream) -> None:
    """Send events until they end. A first one that fails is raised."""
    events = exchange.stream_events(live)
    try:
        block: bytes | None = await anext(events)
        form = exchange.stream_media_type.encode()
        headers = [(b"content-type", form), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while block is not None:
            await send({"type": "http.response.body", "body": block, "more_body": True})
            try:
                block = await anext(events, None)
            except Exception as caught:  # boundary: told to the client within the stream
                block = exchange.format_error_event(_to_request_error(caught))
                await send({"type": "http.response.body", "body": block, "more_body": True})
                break
        await send({"type": "http.response.body", "body": b""})
    finally:
        live.stop_generation()  # after the end there is nothing left to stop
        await events.aclose()


def _to_request_error(caught: Exception) -> ProxyRequestError:
    if isinstance(caught, ProxyRequestError):
        return caught
    log.error("a request failed", exc_info=caught)
    return ProxyRequestError(500, "internal error of the proxy; see its log")

"""ASGI application of the proxy: routes, keys, size limits, errors."""

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from areal_hpc.errors import ClientDisconnectedError, ProxyRequestError
from areal_hpc.proxy.completion.reply import ReplyStream
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.dialects import openai as openai_format
from areal_hpc.proxy.dialects.anthropic import MESSAGES_DIALECT
from areal_hpc.proxy.dialects.dialect import ErrorFormatter, Exchange
from areal_hpc.proxy.dialects.google_reply import format_error as format_google_error
from areal_hpc.proxy.dialects.validation import (
    MAX_UNCOUNTED_BODY_BYTES,
    decode_request_json,
    refuse_too_many_values,
)
from areal_hpc.proxy.engine.model_call import ServedModel, make_random_id
from areal_hpc.proxy.http.agent_api import (
    AgentApi,
    find_google_key,
    read_query_parameters,
)
from areal_hpc.proxy.http.agent_ids import build_call_facts
from areal_hpc.proxy.http.driver_api import DriverApi
from areal_hpc.proxy.http.event_stream import Headers, Send, send_events, to_request_error
from areal_hpc.proxy.http.repeated_requests import Answer, SessionRequests, hash_request
from areal_hpc.proxy.http.routes import (
    ModelAnswer,
    Route,
    Routes,
    render_openapi,
)
from areal_hpc.proxy.metrics import MAX_NAME_CHARS
from areal_hpc.proxy.sessions.store import Session, SessionStore
from areal_hpc.wire import proxy as wire
from areal_hpc.wire.http_server import CONNECTION_KEY, ByteBudget, GuardedProtocol
from areal_hpc.wire.trajectory import CallFacts

RETRY_AFTER_S = 1
"""Time in the header Retry-After of a response with status 429 or 503."""

BODY_BUDGET_IN_LARGEST_BODIES, MAX_BODIES_OF_SESSION = 8, 2
"""Bodies of the largest size that are received at a time, by the proxy and by one session."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""Type of `receive` in ASGI: after the request's body it returns only the client's disconnect."""
Result = TypeVar("Result")
_CONTROL_CHARS_PATTERN = re.compile(rb"[\x00-\x1f\x7f]")

JSON_CONTENT_TYPE, METRICS_CONTENT_TYPE = "application/json", "text/plain; version=0.0.4"
DROPPED_TOOLS_HEADER = b"x-areal-dropped-tools"
"""Header with the types of a request's tools that are left out of the prompt."""
MAX_DROPPED_TOOLS_HEADER_BYTES = 1000


@dataclass(slots=True)
class _Request:
    scope: Scope
    receive: Receive
    send: Send
    headers: dict[bytes, bytes]
    user_agent: str
    google_key: str | None
    """Key in Google's dialect; None in the others."""
    route: Route | None = None
    """Route of the path, perhaps for another method."""
    allowed_methods: Iterable[str] = ()


class ProxyApp:
    """ASGI application without a framework, whose routing and responses would cost more time."""

    def __init__(
        self,
        *,
        admin_key: str,
        metrics_key: str = "",
        driver_key: str = "",
        limits: ProxyLimits,
        model: ServedModel,
        store: SessionStore,
        completions: CompletionService,
        driver_api: DriverApi,
    ) -> None:
        self._admin_key = admin_key.encode()
        self._metrics_key = (metrics_key or admin_key).encode()
        self._driver_key = driver_key.encode()
        self._max_request_bytes = limits.max_request_bytes
        self._max_messages = limits.max_messages
        self._body_budget = ByteBudget(BODY_BUDGET_IN_LARGEST_BODIES * limits.max_request_bytes)
        self._store = store
        self._metrics = completions.metrics
        self._metrics.register_gauges(store)
        agent_api = AgentApi(model, completions)
        form = METRICS_CONTENT_TYPE
        self._google_routes = Routes(agent_api.list_google_routes())
        self._routes = Routes(
            (
                *driver_api.list_routes(),
                *agent_api.list_routes(),
                Route("GET", "/metrics", "reader", self._metrics.render, answer_content_type=form),
                Route("GET", "/openapi.json", "anyone", self._describe_routes),
            )
        )
        self._requests_by_session: WeakKeyDictionary[Session, SessionRequests] = WeakKeyDictionary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        headers = dict[bytes, bytes](scope["headers"])
        client = headers.get(b"user-agent", b"").decode("latin-1")[:MAX_NAME_CHARS]
        google_key = find_google_key(scope, headers)
        request = _Request(scope, receive, send, headers, client, google_key)
        status, more_headers = 200, list[tuple[bytes, bytes]]()
        try:
            answer = await self._answer(request)
        except ClientDisconnectedError:
            return
        except Exception as caught:  # boundary: one request's failure must not reach the others
            refusal = to_request_error(caught)
            route = request.route
            label = route.unversioned_path if route else "unknown route"
            self._metrics.count_refusal(label, client, refusal)
            status = refusal.status
            format_error = _choose_error_format(request)
            answer = Answer(format_error(refusal), JSON_CONTENT_TYPE, [])
            more_headers = _build_refusal_headers(refusal, request)
            # Otherwise the errors and this frame keep each other and the request in memory.
            caught.__traceback__ = refusal.__traceback__ = None
        if answer.is_sent:
            return
        content = answer.content
        answer_headers = [
            (b"content-type", answer.content_type.encode()),
            (b"content-length", str(len(content)).encode()),
            *(answer.headers or _build_id_headers(f"req_{make_random_id(14)}")),
            *more_headers,
        ]
        await send({"type": "http.response.start", "status": status, "headers": answer_headers})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, request: _Request) -> Answer:
        scope, headers, receive = request.scope, request.headers, request.receive
        route, parameter = self._find_route(request)
        if int(headers.get(b"content-length", 0)) > self._max_request_bytes:
            raise self._build_too_large_error()
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding.lower() != b"identity":
            problem = f"a body of content-encoding {encoding[:40].decode('latin-1')!r} is not read"
            raise ProxyRequestError(415, problem, hint="send it as it is")
        # The key is checked before memory is used for a body.
        session, is_driver = self._authenticate(route, _find_key(request), scope)
        if session is not None:
            session.client = request.user_agent
        body = await self._read_body(receive, session) if route.opened_by != "anyone" else b""
        if len(body) > MAX_UNCOUNTED_BODY_BYTES:
            await refuse_too_many_values(body, self._max_messages)
        arguments = self._list_arguments(route, session, parameter, body, request)
        if route.opened_by == "admin" and not is_driver:
            arguments = [_restrict_session_request(argument) for argument in arguments]
        if not route.calls_model or session is None:
            return await _answer(route, arguments, request, keeps_content=False)

        async def answer(is_retry: bool, keeps_content: bool) -> Answer:
            facts = arguments[-1]
            assert isinstance(facts, CallFacts)
            arguments[-1] = msgspec.structs.replace(facts, is_retry=is_retry)
            return await _answer(route, arguments, request, keeps_content=keeps_content)

        requests = self._requests_by_session.get(session)
        if requests is None:
            requests = self._requests_by_session[session] = SessionRequests()
        digest = partial(hash_request, scope["path"], scope["query_string"], body)
        return await requests.answer_once(headers, digest, answer)

    def _find_route(self, request: _Request) -> tuple[Route, str]:
        """Return the route of a request, and the parameter in its path, or an empty text."""
        method, path = request.scope["method"], request.scope["path"]
        routes = self._routes if request.google_key is None else self._google_routes
        by_method, parameter = routes.find_routes(path)
        route = by_method.get(method)
        request.route, request.allowed_methods = route or next(iter(by_method.values())), by_method
        if route is not None:
            return route, parameter
        allowed = ", ".join(by_method)
        if request.headers.get(b"upgrade", b"").lower() == b"websocket":
            raise ProxyRequestError(426, f"{path} takes {allowed} over HTTP/1.1, no WebSocket")
        raise ProxyRequestError(405, f"{path} takes {allowed}, not {method}")

    def _describe_routes(self) -> bytes:
        return render_openapi((*self._google_routes, *self._routes))

    def _build_too_large_error(self) -> ProxyRequestError:
        return ProxyRequestError(413, f"the request exceeds {self._max_request_bytes} bytes")

    async def _read_body(self, receive: Receive, session: Session | None) -> bytes:
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

    def _authenticate(
        self, route: Route, key: str, asgi_scope: Scope
    ) -> tuple[Session | None, bool]:
        """Return the session of the request's key, and whether the run's driver sent it."""
        if route.opened_by in ("session", "control"):
            return self._require_session(route, key), False
        key_bytes = key.encode("latin-1")
        is_driver = bool(self._driver_key) and hmac.compare_digest(key_bytes, self._driver_key)
        if is_driver and route.opened_by in ("admin", "driver"):
            return None, True
        if route.opened_by == "driver":
            here = "" if self._driver_key else "; there is no run here"
            raise ProxyRequestError(401, f"this route is for a run's driver{here}")
        is_admin = hmac.compare_digest(key_bytes, self._admin_key)
        if route.opened_by == "admin" and not is_admin:
            raise ProxyRequestError(401, "this route requires the admin key")
        if route.opened_by == "reader" and not (
            is_admin
            or asgi_scope["server"][0].startswith("127.")
            or hmac.compare_digest(key_bytes, self._metrics_key)
        ):
            raise ProxyRequestError(401, "this route requires the key in rendezvous/metrics.key")
        return None, False

    def _require_session(self, route: Route, key: str) -> Session:
        if route.opened_by == "session":
            session = self._store.find_session_by_key(key)
        else:
            session = self._store.find_session_by_control_key(key)
            if session is None and self._store.find_session_by_key(key) is not None:
                problem = "this key opens model calls; rewards and the end need the control_key"
                hint = 'start_session gives it, or opens all by one key with "rights": "all"'
                raise ProxyRequestError(403, problem, hint=hint)
        if session is None:
            raise ProxyRequestError(401, "invalid session key")
        if route.needs_client_that_records and not session.request.records_calls:
            raise ProxyRequestError(
                403, "this session was not opened for a client that records its own calls"
            )
        session.touch()
        return session

    def _list_arguments(
        self, route: Route, session: Session | None, parameter: str, body: bytes, request: _Request
    ) -> list[object]:
        arguments: list[object] = []
        decoded: object = None
        if session is not None:
            if self._store.sessions.get(session.session_id) is not session:  # deleted meanwhile
                raise ProxyRequestError(401, "invalid session key")
            if session.ended and not route.is_open_after_session_end:
                raise ProxyRequestError(403, "the session has ended")
            arguments.append(session)
        if route.takes_query:
            arguments.append(read_query_parameters(request.scope))
        if parameter and route.request is None:
            arguments += parameter, read_query_parameters(request.scope)
        elif route.request is not None and route.passes_unknown_params:
            unknown: list[str] = []
            decode = partial(decode_request_json, json_type=route.request, unknown_params=unknown)
            if route.repeats_messages and session is not None:
                decoded = session.latest_messages.decode_body(body, decode)
            else:
                decoded = decode(body)
            arguments += decoded, unknown
        elif route.request is not None:
            decoded = decode_request_json(body, route.request)
            arguments.append(decoded)
        if route.takes_facts:
            assert isinstance(decoded, msgspec.Struct)
            arguments.append(build_call_facts(request.headers, decoded))
        return arguments


async def _answer(
    route: Route, arguments: list[object], request: _Request, *, keeps_content: bool
) -> Answer:
    result = route.answer(*arguments)
    if isinstance(result, Coroutine):
        result = await cancel_on_disconnect(request.scope, result)
    headers: Headers = []
    if isinstance(result, ModelAnswer):
        exchange, headers = result.exchange, _build_answer_headers(result.exchange)
        if isinstance(result.reply, ReplyStream):
            sending = send_events(
                request.send, headers, exchange, result.reply, keeps_content=keeps_content
            )
            try:
                content, is_whole = await cancel_on_disconnect(request.scope, sending)
            except ClientDisconnectedError:
                if not result.reply.abandoned:  # `send_events` had not begun
                    result.reply.stop_generation()
                raise
            return Answer(content, exchange.stream_media_type, headers, True, is_whole)
        result = result.reply
    content = result if isinstance(result, bytes) else msgspec.json.encode(result)
    return Answer(content, route.answer_content_type, headers)


def _restrict_session_request(argument: object) -> object:
    if not isinstance(argument, wire.StartSessionRequest):
        return argument
    if argument.ref is not None:
        problem = "sessions of a run's tickets are opened by its driver alone"
        raise ProxyRequestError(403, problem, key="ref")
    return msgspec.structs.replace(argument, rights=argument.rights or "calls")


async def cancel_on_disconnect(scope: Scope, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work, and cancel it when the client hangs up.

    In the client's own process there is no connection: the client's task runs this.
    """
    connection: GuardedProtocol | None = scope.get(CONNECTION_KEY)
    worker = asyncio.current_task()
    if connection is None or worker is None:
        return await work
    if connection.transport.is_closing():
        work.close()
        raise ClientDisconnectedError
    connection.on_disconnect = worker.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not connection.has_disconnected:
            raise
        worker.uncancel()
        raise ClientDisconnectedError from None
    finally:
        connection.on_disconnect = None


def _build_answer_headers(exchange: Exchange) -> Headers:
    headers = _build_id_headers(exchange.answer_id)
    if exchange.call.dropped_tools:
        names = ", ".join(exchange.call.dropped_tools).encode("ascii", "backslashreplace")
        value = _CONTROL_CHARS_PATTERN.sub(b"?", names[:MAX_DROPPED_TOOLS_HEADER_BYTES])
        headers.append((DROPPED_TOOLS_HEADER, value))
    return headers


def _build_id_headers(request_id: str) -> Headers:
    return [(name, request_id.encode()) for name in (b"x-request-id", b"request-id")]


def _find_key(request: _Request) -> str:
    headers = request.headers
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""
    return key or request.google_key or headers.get(b"x-api-key", b"").decode("latin-1")


def _choose_error_format(request: _Request) -> ErrorFormatter:
    if request.route is not None and request.route.error_formatter is not None:
        return request.route.error_formatter
    if request.google_key is not None:
        return format_google_error
    path, headers = request.scope["path"], request.headers
    is_anthropic = "/messages/" in f"{path}/" or b"anthropic-version" in headers
    return MESSAGES_DIALECT.error_formatter if is_anthropic else openai_format.format_error


def _build_refusal_headers(refusal: ProxyRequestError, request: _Request) -> Headers:
    headers: Headers = []
    if refusal.status == 405:
        headers.append((b"allow", ", ".join(request.allowed_methods).encode()))
    if refusal.status == 426:  # clients that try a WebSocket first then use HTTP at once
        headers += [(b"upgrade", b"HTTP/1.1"), (b"connection", b"upgrade")]
    if not refusal.may_be_repeated:
        # SDKs of OpenAI and Anthropic repeat requests after any status from 500 on.
        headers.append((b"x-should-retry", b"false"))
    if refusal.status in (429, 503):
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S))
    return headers

"""ASGI application of the proxy: routes, keys, size limits, errors."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

import msgspec

from areal_hpc.errors import ClientDisconnectedError, RequestError
from areal_hpc.proxy.completion.service import CompletionService
from areal_hpc.proxy.dialects import tokenize
from areal_hpc.proxy.dialects.anthropic import reply as messages_reply
from areal_hpc.proxy.dialects.anthropic import request as messages_request
from areal_hpc.proxy.dialects.anthropic.reply import MESSAGES
from areal_hpc.proxy.dialects.dialect import Dialect, EventStream, FormatError
from areal_hpc.proxy.dialects.openai import format as openai_format
from areal_hpc.proxy.dialects.openai.chat_reply import CHAT
from areal_hpc.proxy.dialects.openai.completions_reply import COMPLETIONS
from areal_hpc.proxy.dialects.openai_responses import reply as responses_reply
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.passthrough import GeneratePassthrough
from areal_hpc.proxy.http.disconnect import Receive, cancel_on_disconnect
from areal_hpc.proxy.http.driver_api import DriverApi
from areal_hpc.proxy.http.routes import (
    Route,
    RouteResult,
    Routes,
    SessionHandler,
    add_unprefixed,
    render_openapi,
)
from areal_hpc.proxy.sessions.store import Session, SessionStore
from areal_hpc.session.tree import encode_ids
from areal_hpc.wire import proxy as wire

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1
"""When a request that came at a busy moment (429) may be repeated."""

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


DIALECT_BY_ROUTE = {
    "/chat/completions": CHAT,
    "/completions": COMPLETIONS,
    "/messages": MESSAGES,
    "/responses": responses_reply.RESPONSES,
}
JSON, PLAIN = "application/json", "text/plain; version=0.0.4"
_EVENTS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class ProxyApp:
    """Raw ASGI: a framework's routing and response classes would cost more than our own work."""

    def __init__(
        self,
        *,
        admin_key: str,
        max_request_bytes: int,
        model: ServedModel,
        book: SessionStore,
        caller: CompletionService,
        control: DriverApi,
        relay: GeneratePassthrough | None = None,
    ) -> None:
        self._admin_key = admin_key.encode()
        self._max_request_bytes = max_request_bytes
        self._model = model
        self._book = book
        self._caller = caller
        self._control = control
        self._relay = relay
        caller.metrics.watch(book)
        self._guards: dict[str, Callable[[str], Session | None]] = {
            "admin": self._require_admin,
            "session": self._session,
            "anyone": lambda key: None,
        }
        self._routes = Routes(
            (
                *self._routes_of_drivers(control),
                *add_unprefixed(self._routes_of_agents()),
                Route("GET", "/healthz", "anyone", self._health),
                Route("GET", "/metrics", "anyone", self._metrics, form=PLAIN),
                Route("GET", "/openapi.json", "anyone", self._openapi),
            )
        )

    def _routes_of_agents(self) -> Iterator[Route]:
        def agent(path: str, answer: SessionHandler, request: type[msgspec.Struct]) -> Route:
            return Route("POST", path, "session", answer, request)

        for path, dialect in DIALECT_BY_ROUTE.items():
            said = agent(path, self._speaking(path, dialect), dialect.request)
            yield replace(said, refused=dialect.refused, streams=True)
        counted = agent("/messages/count_tokens", self._count_tokens, MESSAGES.request)
        yield replace(counted, refused=MESSAGES.refused)
        yield agent("/tokenize", self._tokenize, tokenize.TokenizeRequest)
        yield agent("/detokenize", self._detokenize, tokenize.DetokenizeRequest)
        yield Route("GET", "/models", "session", self._models)
        yield Route("GET", "/responses/{response_id}", "session", self._retrieve_response)
        yield Route("DELETE", "/responses/{response_id}", "session", self._delete_response)

    def _routes_of_drivers(self, control: DriverApi) -> Iterator[Route]:
        def admin(
            path: str, answer: SessionHandler, request: type[msgspec.Struct] | None = None
        ) -> Route:
            return Route("POST", path, "admin", answer, request)

        def session(
            path: str,
            answer: Callable[[Session, bytes], bytes],
            request: type[msgspec.Struct] | None = None,
        ) -> Route:
            return Route("POST", path, "session", self._of_session(answer), request)

        start = _ignoring_session(control.start_session)
        finish = _ignoring_session(control.finish_ticket)
        offer, wait = _awaiting(control.offer_episode), _awaiting(control.await_session)
        export = _awaiting(control.export_trajectories)
        yield admin("/rl/start_session", start, wire.StartSessionRequest)
        yield admin("/rl/offer_episode", offer, wire.OfferEpisodeRequest)
        yield admin("/rl/await_session", wait, wire.AwaitSessionRequest)
        yield admin("/rl/finish_ticket", finish, wire.FinishTicketRequest)
        yield admin("/rl/seal", _awaiting(control.seal))
        yield admin("/export_trajectories", export, wire.ExportRequest)
        yield admin("/grant_capacity", _ignoring_session(control.grant_capacity))
        yield session("/rl/set_reward", control.set_reward, wire.SetRewardRequest)
        yield session("/rl/record", control.record, wire.RecordRequest)
        yield session("/rl/end_session", control.end_session)
        yield Route("POST", "/generate", "session", self._generate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']}")
        refused: FormatError = openai_format.format_error
        allowed = ""
        try:
            methods, named = self._routes.at(scope["path"])
            route, key = methods.get(scope["method"]), ""
            refused = (route or next(iter(methods.values()))).refused
            if route is None:
                method, path, allowed = scope["method"], scope["path"], ", ".join(methods)
                if _asks_for_websocket(scope):
                    raise RequestError(426, f"{path} takes {allowed} over HTTP/1.1, no WebSocket")
                raise RequestError(405, f"{path} takes {allowed}, not {method}")
            for name, value in scope["headers"]:
                if name == b"authorization" and value[:7].lower() == b"bearer ":
                    key = value[7:].strip().decode("latin-1")
                elif name == b"x-api-key" and not key:
                    key = value.decode("latin-1")
                elif name == b"content-length" and int(value) > self._max_request_bytes:
                    raise self._too_large()
            opened = self._guards[route.opened_by](key)  # without a key no memory for a body
            asked = await self._body(receive)
            if named:
                asked = _name_alone(named, scope["query_string"])
            result = await cancel_on_disconnect(receive, route.answer(opened, asked))
            if not isinstance(result, bytes):
                await cancel_on_disconnect(receive, _send_events(send, result))
                return
            status, content, form = 200, result, route.form
        except ClientDisconnectedError:
            return
        except Exception as caught:  # boundary: one request's failure must not reach the others
            refusal = _refusal(caught)
            status, content, form = refusal.status, refused(refusal), JSON
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

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the request exceeds {self._max_request_bytes} bytes")

    async def _body(self, receive: Receive) -> bytes:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            part: bytes = message.get("body", b"")
            body += part
            if len(body) > self._max_request_bytes:
                raise self._too_large()
            if not message.get("more_body"):
                return body

    # Keys ---------------------------------------------------------------------------------

    def _require_admin(self, key: str) -> None:
        if not hmac.compare_digest(key.encode("latin-1"), self._admin_key):
            raise RequestError(401, "this route requires the admin key")

    def _session(self, key: str) -> Session:
        session = self._book.session_of_key(key)
        if session is None:
            raise RequestError(401, "invalid session key")
        session.touch()
        return session

    def _held(self, opened: Session | None) -> Session:
        """The session that a key opened, unless it went while the body came."""
        if opened is None or self._book.sessions.get(opened.session_id) is not opened:
            raise RequestError(401, "invalid session key")
        return opened

    def _open_session(self, opened: Session | None) -> Session:
        session = self._held(opened)
        if session.ended:
            raise RequestError(403, "the session has ended")
        return session

    def _of_session(self, answer: Callable[[Session, bytes], bytes]) -> SessionHandler:
        async def handler(opened: Session | None, body: bytes) -> bytes:
            return answer(self._held(opened), body)

        return handler

    # Routes -------------------------------------------------------------------------------

    async def _generate(self, opened: Session | None, body: bytes) -> bytes:
        session = self._open_session(opened)
        if self._relay is None:
            raise RequestError(404, "there is no route /generate")
        return await self._relay.generate(session, body)

    async def _health(self, opened: Session | None, body: bytes) -> bytes:
        return self._control.health()

    async def _metrics(self, opened: Session | None, body: bytes) -> bytes:
        return self._caller.metrics.render()

    async def _openapi(self, opened: Session | None, body: bytes) -> bytes:
        return render_openapi(self._routes)

    async def _models(self, opened: Session | None, body: bytes) -> bytes:
        return openai_format.format_models(self._model.name, self._model.context_tokens)

    async def _retrieve_response(self, opened: Session | None, name: bytes) -> bytes:
        return responses_reply.retrieve_response(self._open_session(opened), name.decode())

    async def _delete_response(self, opened: Session | None, name: bytes) -> bytes:
        return responses_reply.delete_response(self._open_session(opened), name.decode())

    async def _count_tokens(self, opened: Session | None, body: bytes) -> bytes:
        session = self._open_session(opened)
        _, call = messages_request.parse(body, session.request.sampling, self._model)
        self._caller.metrics.count_ignored("/messages/count_tokens", call.ignored)
        _, count = await self._caller.prompt_json(session, call)
        return messages_reply.format_token_count(count)

    async def _tokenize(self, opened: Session | None, body: bytes) -> bytes:
        session = self._open_session(opened)
        request = tokenize.parse_tokenize(body)
        if request.prompt is None:
            call = tokenize.build_chat_call(request)
            return tokenize.format_tokenize_reply(
                *await self._caller.prompt_json(session, call), self._model
            )
        with_special = request.add_special_tokens is not False
        ids = await self._caller.encode(request.prompt, add_special_tokens=with_special)
        return tokenize.format_tokenize_reply(encode_ids(ids), len(ids), self._model)

    async def _detokenize(self, opened: Session | None, body: bytes) -> bytes:
        self._open_session(opened)
        return tokenize.detokenize(body, self._model)

    def _speaking(self, path: str, dialect: Dialect) -> SessionHandler:
        """Answers model calls in a dialect."""

        async def handler(opened: Session | None, body: bytes) -> RouteResult:
            session = self._open_session(opened)
            exchange = dialect.read(body, session, self._model)
            call, answer_id = exchange.call, exchange.answer_id
            self._caller.metrics.count_ignored(path, call.ignored)
            if exchange.streams:
                return exchange.events(await self._caller.stream(session, call, answer_id))
            return exchange.whole(await self._caller.answer(session, call, answer_id))

        return handler


def _asks_for_websocket(scope: Scope) -> bool:
    return any(
        name == b"upgrade" and value.lower() == b"websocket" for name, value in scope["headers"]
    )


def _ignoring_session(answer: Callable[[bytes], bytes]) -> SessionHandler:
    async def handler(opened: Session | None, body: bytes) -> bytes:
        return answer(body)

    return handler


def _awaiting(answer: Callable[[bytes], Awaitable[bytes]]) -> SessionHandler:
    async def handler(opened: Session | None, body: bytes) -> bytes:
        return await answer(body)

    return handler


def _name_alone(name: str, query: bytes) -> bytes:
    if query:
        parameter = unquote(query.partition(b"=")[0])
        raise RequestError(400, "this route takes no parameters", key=parameter)
    return name.encode()


async def _send_events(send: Send, events: EventStream) -> None:
    """Send events until they end. A first one that fails is raised."""
    try:
        block: bytes | None = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        while block is not None:
            await send({"type": "http.response.body", "body": block, "more_body": True})
            try:
                block = await anext(events, None)
            except Exception as caught:  # boundary: told to the client within the stream
                block = events.broken(_refusal(caught))
                await send({"type": "http.response.body", "body": block, "more_body": True})
                break
        await send({"type": "http.response.body", "body": b""})
    finally:
        events.abandon()  # after the end there is nothing left to stop


def _refusal(caught: Exception) -> RequestError:
    if isinstance(caught, RequestError):
        return caught
    log.error("a request failed", exc_info=caught)
    return RequestError(500, "internal error of the proxy; see its log")

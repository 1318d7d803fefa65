"""ASGI shell of the run's services: bearer keys, body limit, JSON answers and errors, the server.

Of Starlette it uses what reads requests and writes responses. Its routing and its error middleware
are not used: the latter raises a handled exception again, at which uvicorn closes the connection.
"""

import hmac
import logging
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_hpc.wire.http_server import GuardedServer, get_connection_descriptor_limit

log = logging.getLogger(__name__)
FormT = TypeVar("FormT")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request; nothing of it is read if it is announced to be too large.

    Raises:
        HTTPException: 413.
        ClientDisconnect: The client left before it had sent all.
    """
    too_large = HTTPException(413, f"a body holds at most {max_bytes} bytes")
    announced = request.headers.get("content-length", "0")
    body = bytearray()
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_large
    return bytes(body)


def decode_body(body: bytes, body_type: type[FormT]) -> FormT:
    """The JSON of a request.

    Raises:
        HTTPException: 400: it is none of that form, no UTF-8, or nested beyond all reason.
    """
    try:
        return msgspec.json.decode(body, type=body_type)
    except RecursionError:
        raise HTTPException(400, "the JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HTTPException(400, f"expected {body_type.__name__} as JSON: {error}") from error


class JsonApp(ABC):
    """ASGI application whose answers are JSON, and whose errors are `{"error": "..."}`.

    Nothing is read of a request that does not show `bearer_key`, if there is one.
    """

    def __init__(self, bearer_key: str = "") -> None:
        self._authorization = f"Bearer {bearer_key}".encode() if bearer_key else b""

    @abstractmethod
    async def answer(self, request: Request) -> tuple[int, bytes]:
        """Status and JSON of the answer to a request. May raise whatever it likes."""

    def get_error_status_and_text(self, request: Request, error: Exception) -> tuple[int, str]:
        """Status and text for what `answer` has raised."""
        if isinstance(error, HTTPException):
            return error.status_code, error.detail
        log.error("%s failed", request.scope["path"], exc_info=error)
        return 500, f"{type(error).__name__}: {error}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this service speaks HTTP only, not {scope['type']}")
        request = Request(scope, receive)
        try:
            self._require_key(request)
            status, content = await self.answer(request)
        except ClientDisconnect:
            return
        except Exception as error:  # boundary: one bad request must not end the service
            status, text = self.get_error_status_and_text(request, error)
            content = msgspec.json.encode({"error": text})
        await Response(content, status, media_type="application/json")(scope, receive, send)

    def _require_key(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if self._authorization and not hmac.compare_digest(given, self._authorization):
            raise HTTPException(401, "expected the run's bearer key for this service")


class ServiceServer(GuardedServer):
    """HTTP server of one application. Its owner stops it by `should_exit`, no signal does."""

    def __init__(self, app: ASGIApp, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(app, get_connection_descriptor_limit(), tls, timeout_graceful_shutdown=1)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

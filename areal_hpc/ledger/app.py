"""The HTTP face of the ledger: raw ASGI, JSON by msgspec, one secret.

Errors are `{"error": "..."}` with status 400 (unreadable or impossible request), 401 (key),
404, 405, 409 (a superseded trainer, or one that opened no epoch), 413 (size), 500 (damaged
run directory, or a defect) or 503 (the file system refused; try again).
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from areal_hpc.ledger.refusal import Refused
from areal_hpc.ledger.service import LedgerService
from areal_hpc.ledger.waiting import CallerGone, Patience, Receive
from areal_hpc.rundir.paths import ADMIN_KEY
from areal_hpc.wire.ledger import (
    BatchRequest,
    DropRequest,
    Empty,
    EvaluatedRequest,
    EvaluateRequest,
    FinishRequest,
    LeaseRequest,
    OpenEpochRequest,
    PublishRequest,
    SettleRequest,
)

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""Room for a settle of about 10^5 rows."""

Send = Callable[[dict[str, Any]], Awaitable[None]]
Handler = Callable[[Any, Patience], Awaitable[msgspec.Struct]]


@dataclass(frozen=True, slots=True)
class _Route:
    decode: Callable[[bytes], Any]
    handler: Handler


class LedgerApp:
    """The ASGI application: checks the key, decodes, lets the service answer, encodes."""

    def __init__(self, service: LedgerService, admin_key: str, clock: Callable[[], float]) -> None:
        self._authorization = f"Bearer {admin_key}".encode()
        self._clock = clock
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._encode = msgspec.json.Encoder().encode
        handlers: dict[str, tuple[type[msgspec.Struct], Handler]] = {
            "/lease": (LeaseRequest, service.lease),
            "/settle": (SettleRequest, service.settle),
            "/drop": (DropRequest, service.drop),
            "/evaluated": (EvaluatedRequest, service.evaluated),
            "/open_epoch": (OpenEpochRequest, service.open_epoch),
            "/batch": (BatchRequest, service.batch),
            "/publish": (PublishRequest, service.publish),
            "/evaluate": (EvaluateRequest, service.evaluate),
            "/finish": (FinishRequest, service.finish),
            "/status": (Empty, service.status),
        }
        self._routes = {
            path: _Route(msgspec.json.Decoder(request).decode, handler)
            for path, (request, handler) in handlers.items()
        }

    def close(self) -> None:
        """Answer every waiting request now: the server stops."""
        if not self._closing.done():
            self._closing.set_result(None)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"the ledger speaks HTTP only, not {scope['type']}")
        try:
            status, body = 200, await self._answer(scope, receive)
        except CallerGone:
            return
        except Refused as refusal:
            status, body = refusal.status, _error(str(refusal))
        except OSError as error:  # a full or absent file system: the caller tries again
            log.error("%s failed: %s", scope["path"], error)
            status, body = 503, _error(f"the ledger cannot write: {error}")
        except Exception as error:  # boundary: one bad request must not end the ledger
            log.exception("%s failed", scope["path"])
            status, body = 500, _error(f"{type(error).__name__}: {error}")
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: dict[str, Any], receive: Receive) -> bytes:
        self._check_key(scope)
        route = self._routes.get(scope["path"])
        if route is None:
            known = " ".join(self._routes)
            raise Refused(404, f"there is no route {scope['path']}; the ledger has {known}")
        if scope["method"] != "POST":
            raise Refused(405, f"{scope['path']} takes POST, got {scope['method']}")
        body = await _read_body(scope, receive)
        try:
            request = route.decode(body)
        except msgspec.DecodeError as error:
            raise Refused(400, f"{scope['path']} cannot read its request: {error}") from error
        patience = Patience(receive, self._clock, self._closing)
        try:
            return self._encode(await route.handler(request, patience))
        finally:
            patience.end()

    def _check_key(self, scope: dict[str, Any]) -> None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        if not hmac.compare_digest(given, self._authorization):
            raise Refused(401, "the admin key is missing or wrong", hint=f"read {ADMIN_KEY}")


async def _read_body(scope: dict[str, Any], receive: Receive) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallerGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_REQUEST_BYTES:
            raise Refused(413, f"{scope['path']} takes at most {MAX_REQUEST_BYTES} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _error(message: str) -> bytes:
    return msgspec.json.encode({"error": message})

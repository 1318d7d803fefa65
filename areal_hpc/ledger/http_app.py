"""HTTP application of the ledger.

Errors are `{"error": "..."}` with status 400 (unreadable or impossible request), 401 (key), 404,
405, 409 (a superseded trainer, or one that opened no generation), 413 (size), 500 (damaged run
directory, or a defect) or 503 (the file system refused; try again).
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request

from areal_hpc.errors import LedgerRequestError
from areal_hpc.ledger.long_poll import LongPoll
from areal_hpc.ledger.service import LedgerService
from areal_hpc.rundir.rendezvous import LEDGER_SERVICE
from areal_hpc.wire import ledger as wire
from areal_hpc.wire.asgi import JsonApp, decode_body, read_body
from areal_hpc.wire.service_key import derive_bearer_key

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 1024 * 1024
"""Room for a settle of about 10^5 rows."""

RouteHandler = Callable[..., Awaitable[msgspec.Struct]]
"""Of the decoded request; those of `_waiting_routes` of its long poll, too."""


class LedgerApp(JsonApp):
    """The ASGI application of the ledger."""

    def __init__(
        self, service: LedgerService, service_key: str, clock: Callable[[], float]
    ) -> None:
        super().__init__(derive_bearer_key(service_key, LEDGER_SERVICE))
        self._clock = clock
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_routes: dict[str, tuple[type[msgspec.Struct], RouteHandler]] = {
            "/lease": (wire.LeaseRequest, service.lease_tickets_to_cell),
            "/batch": (wire.BatchRequest, service.hand_out_batch),
            "/evaluate": (wire.EvaluateRequest, service.follow_evaluation),
        }
        self._routes = self._waiting_routes | {
            "/settle": (wire.SettleTicketsRequest, service.settle_tickets),
            "/drop": (wire.DropTicketRequest, service.drop_ticket),
            "/report_evaluation": (wire.EvaluationResultRequest, service.record_evaluation_result),
            "/open_generation": (wire.OpenTrainerGenerationRequest, service.open_generation),
            "/publish": (wire.WeightsPublishedRequest, service.record_published_step),
            "/finish": (wire.FinishRunRequest, service.finish_run),
            "/status": (wire.Empty, service.get_status),
        }

    def end_long_polls(self) -> None:
        if not self._closing.done():
            self._closing.set_result(None)

    async def answer(self, request: Request) -> tuple[int, bytes]:
        """Decode, let the service answer, encode."""
        path = request.scope["path"]
        if path not in self._routes:
            raise LedgerRequestError(404, f"no route {path}; routes: {' '.join(self._routes)}")
        if request.method != "POST":
            raise LedgerRequestError(405, f"{path} takes POST, got {request.method}")
        form, handler = self._routes[path]
        decoded = decode_body(await read_body(request, MAX_REQUEST_BYTES), form)
        if path not in self._waiting_routes:
            return 200, msgspec.json.encode(await handler(decoded))
        long_poll = LongPoll(self._clock, request.receive, self._closing)
        try:
            return 200, msgspec.json.encode(await handler(decoded, long_poll))
        finally:
            long_poll.stop_disconnect_watch()

    def get_error_status_and_text(self, request: Request, error: Exception) -> tuple[int, str]:
        """Status and text for what `answer` has raised."""
        if isinstance(error, LedgerRequestError):
            return error.status, str(error)
        if isinstance(error, OSError):  # a full or absent file system: the caller tries again
            log.error("%s failed: %s", request.scope["path"], error)
            return 503, f"the ledger cannot write: {error}"
        return super().get_error_status_and_text(request, error)

"""Process of the ledger: it rebuilds its state from the run directory, and serves over HTTP."""

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import uvloop
from starlette.requests import Request

from areal_hpc.errors import AgentError, ClusterError, LedgerRequestError
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS
from areal_hpc.jobs.node import get_advertised_host
from areal_hpc.jobs.processes.process_setup import StopRequest
from areal_hpc.ledger.config import LedgerJobConfig
from areal_hpc.ledger.service import LedgerService
from areal_hpc.ledger.task_stream import CURRICULUM_KEY, Curriculum, TaskStream
from areal_hpc.ledger.tickets import TicketPolicy
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.files import claim_next_number, fsync_path, read_newest_number
from areal_hpc.rundir.manifests import read_drops
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_server_tls
from areal_hpc.rundir.telemetry.prometheus import build_samples, register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.shards.index import read_sealed_tickets
from areal_hpc.wire import ledger as wire
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.http_server import JsonApp, LongPoll, ServiceServer, read_message

log = logging.getLogger(__name__)

STOP_POLL_S = 0.1
EVALUATION_POLL_S = 5.0
EXPIRY_CHECKS_PER_TIMEOUT = 30


def run(config: dict[str, Any]) -> None:
    parsed = LedgerJobConfig.model_validate(config)
    stop = StopRequest.install()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_ledger(parsed, stop))


async def serve_ledger(config: LedgerJobConfig, stop: StopRequest) -> None:
    """Rebuild the state, listen, publish the address, and expire leases until a stop request."""
    paths, recipe, sets = RunPaths(config.run_dir), config.recipe, config.evaluation_sets
    has_curriculum = bool(recipe.rollout.curriculum) and not config.evaluates
    clock = AwakeClock()  # it stands still while storage hangs or the node is frozen
    try:
        service = LedgerService(
            paths,
            TicketPolicy.from_recipe(recipe, config.cell_timeout_s, trains=not config.evaluates),
            TaskStream(
                config.task_sources,
                recipe.rollout.episodes_per_ticket,
                recipe.seed,
                load_curriculum(config, paths) if has_curriculum else None,
                {item.number: item.n_samples for item in sets.values()},
            ),
            evaluation_sets=sets,
            tasks_by_evaluation_set=config.tasks_by_evaluation_set,
            clock=clock.now,
        )
        key = rendezvous.read_service_key(paths.service_key)
    except OSError as error:
        raise ClusterError(
            f"the ledger cannot write to the run directory: {error}",
            key=str(paths.root),
            hint="check free space, quota and permissions",
        ) from error
    register_sample_reader(
        lambda: build_samples("areal_hpc_ledger", service.collect_progress_gauges())
    )
    app = LedgerApp(service, key, clock.now)
    listener = socket.create_server((get_advertised_host(), 0), backlog=1024)
    server = ServiceServer(app, make_server_tls(paths.service_key))
    server_task = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    rendezvous.publish_endpoint(
        paths.rendezvous_dir, rendezvous.LEDGER_SERVICE, f"https://{host}:{port}"
    )
    record_state_entry("serve")
    log.info("listening on %s:%d (start %d of this run's ledger)", host, port, service.incarnation)
    expiry_check_interval_s = config.cell_timeout_s / EXPIRY_CHECKS_PER_TIMEOUT
    checked_at_s = clock.now()
    evaluation_task = (
        asyncio.create_task(evaluate_loaded_weights(service, paths, config.evaluates, clock.now))
        if config.evaluates
        else None
    )
    while not stop.requested and not server_task.done():
        await asyncio.sleep(STOP_POLL_S)
        if evaluation_task is not None and evaluation_task.done():
            evaluation_task.result()
        if clock.now() - checked_at_s >= expiry_check_interval_s:
            service.expire_leases()
            checked_at_s = clock.now()
    if evaluation_task is not None:
        evaluation_task.cancel()
    app.end_long_polls()
    server.should_exit = True
    await server_task


def load_curriculum(config: LedgerJobConfig, paths: RunPaths) -> Curriculum:
    """Load the user's curriculum, and record the rewards of all finished groups in it."""
    sys.path[:0] = [folder for folder in config.sys_path if folder not in sys.path]
    curriculum = Curriculum(
        paths.curriculum_draws,
        load_user_function(config.recipe.rollout.curriculum, CURRICULUM_KEY),
        n_tasks=config.n_train_tasks,
        batch_size=config.recipe.trainer.batch_size,
        seed=config.recipe.seed,
    )
    for ticket in read_sealed_tickets(paths.shard_index_dir):
        curriculum.record_rewards(ticket.ref.ticket_id, ticket.rewards)
    for drop in read_drops(paths):
        curriculum.record_rewards(drop.ref.ticket_id, drop.rewards)
    return curriculum


async def evaluate_loaded_weights(
    service: LedgerService,
    paths: RunPaths,
    n_tasks_by_set: Mapping[str, int],
    clock: Callable[[], float],
) -> None:
    """Evaluate the sets on the weights that replicas load, then finish the run.

    All starts of the ledger use one generation, because the weights never change: results of an
    earlier start count. `clock` is that of the service.
    """
    generations = paths.generations_dir
    generation = read_newest_number(generations) or claim_next_number(generations)
    open_request = wire.OpenTrainerGenerationRequest(
        generation, STEP_OF_LOADED_WEIGHTS, STEP_OF_LOADED_WEIGHTS
    )
    await service.open_generation(open_request)
    request = wire.EvaluateRequest(
        generation, STEP_OF_LOADED_WEIGHTS, dict(n_tasks_by_set), EVALUATION_POLL_S
    )
    long_poll = LongPoll(clock)
    reply = await service.follow_evaluation(request, long_poll)
    log.info("%d of %d tasks were done before", reply.done, reply.total)
    while reply.metrics is None and not reply.trouble:
        reply = await service.follow_evaluation(request, long_poll)
    if reply.trouble:
        raise AgentError(reply.trouble, hint="fix it, and run the same command again")
    paths.finished_marker.touch()
    fsync_path(paths.finished_marker)
    fsync_path(paths.root)
    await service.finish_run(wire.FinishRunRequest(generation))


RouteHandler = Callable[..., Awaitable[msgspec.Struct]]
"""Handler of a decoded request; those of `_waiting_routes` also take its long poll."""


class LedgerApp(JsonApp):
    """The ledger's HTTP application.

    Errors are `{"error": "..."}` with status 400 (unreadable or impossible request), 401 (key),
    404, 405, 409 (a superseded trainer, or one that opened no generation), 413 (size), 500 (damaged
    run directory, or a defect) or 503 (error of the file system; try again).
    """

    def __init__(
        self, service: LedgerService, service_key: str, clock: Callable[[], float]
    ) -> None:
        super().__init__(derive_bearer_key(service_key, rendezvous.LEDGER_SERVICE))
        self._clock = clock
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_routes: dict[str, tuple[type[msgspec.Struct], RouteHandler]] = {
            "/lease": (wire.LeaseRequest, service.lease_tickets_to_cell),
            "/batch": (wire.BatchRequest, service.hand_out_batch),
            "/evaluate": (wire.EvaluateRequest, service.follow_evaluation),
        }
        self._routes = self._waiting_routes | {
            "/settle": (wire.SettleShardsRequest, service.settle_shards),
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
        path = request.scope["path"]
        if path not in self._routes:
            raise LedgerRequestError(404, f"no route {path}; routes: {' '.join(self._routes)}")
        if request.method != "POST":
            raise LedgerRequestError(405, f"{path} takes POST, got {request.method}")
        message_type, handler = self._routes[path]
        decoded = await read_message(request, message_type)
        if path not in self._waiting_routes:
            return 200, msgspec.json.encode(await handler(decoded))
        long_poll = LongPoll(self._clock, request.receive, self._closing)
        try:
            return 200, msgspec.json.encode(await handler(decoded, long_poll))
        finally:
            long_poll.stop_disconnect_watch()

    def build_error_reply(self, request: Request, error: Exception) -> tuple[int, str]:
        if isinstance(error, LedgerRequestError):
            return error.status, str(error)
        if isinstance(error, OSError):  # a full or absent file system: the caller should try again
            log.error("%s failed: %s", request.scope["path"], error)
            return 503, f"the ledger cannot write: {error}"
        return super().build_error_reply(request, error)

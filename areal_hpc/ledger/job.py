"""The ledger's process: rebuild from the run directory, serve until told to stop."""

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

import uvloop

from areal_hpc.errors import AgentError, ClusterError
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS
from areal_hpc.jobs.node.topology import get_advertised_host
from areal_hpc.jobs.processes.signals import StopRequest
from areal_hpc.ledger.batch_formation import read_sealed_tickets
from areal_hpc.ledger.config import LedgerJobConfig
from areal_hpc.ledger.http_app import LedgerApp
from areal_hpc.ledger.long_poll import LongPoll
from areal_hpc.ledger.service import LedgerService
from areal_hpc.ledger.tasks.curriculum import RECIPE_KEY, Curriculum
from areal_hpc.ledger.tasks.task_stream import TaskStream
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.atomic import fsync_path
from areal_hpc.rundir.generations import claim_next_number, read_newest_number
from areal_hpc.rundir.manifests import read_drops
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.prometheus import build_samples, register_sample_reader
from areal_hpc.rundir.telemetry.spans import record_state_entry
from areal_hpc.wire.asgi import ServiceServer
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.ledger import EvaluateRequest, FinishRunRequest, OpenTrainerGenerationRequest
from areal_hpc.wire.service_key import make_server_tls

log = logging.getLogger(__name__)

STOP_POLL_S = 0.1
EVALUATION_POLL_S = 5.0
EXPIRY_CHECKS_PER_TIMEOUT = 30


def run(config: dict[str, Any]) -> None:
    """Serve the ledger of a run until a stop signal."""
    parsed = LedgerJobConfig.model_validate(config)
    stop = StopRequest.install()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_ledger(parsed, stop))


async def serve_ledger(config: LedgerJobConfig, stop: StopRequest) -> None:
    """Rebuild, listen, publish the address, expire leases, until `stop` is requested."""
    paths, recipe, sets = RunPaths(config.run_dir), config.recipe, config.evaluation_sets
    has_curriculum = bool(recipe.rollout.curriculum) and not config.evaluates
    clock = AwakeClock()  # while storage hangs, or the node is frozen, no cell can be heard
    try:
        service = LedgerService(
            paths,
            config.ticket_policy,
            TaskStream(
                config.task_sources,
                recipe.rollout.episodes_per_ticket,
                recipe.seed,
                load_curriculum(config, paths) if has_curriculum else None,
                {one.number: one.n_samples for one in sets.values()},
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
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    host, port = listener.getsockname()[:2]
    rendezvous.publish_endpoint(
        paths.rendezvous_dir, rendezvous.LEDGER_SERVICE, f"https://{host}:{port}"
    )
    record_state_entry("serve")
    log.info("listening on %s:%d (start %d of this run's ledger)", host, port, service.incarnation)
    expiry_check_every_s = config.cell_timeout_s / EXPIRY_CHECKS_PER_TIMEOUT
    checked_at_s = clock.now()
    evaluating = (
        asyncio.create_task(evaluate_loaded_weights(service, paths, config.evaluates, clock.now))
        if config.evaluates
        else None
    )
    while not stop.requested and not serving.done():
        await asyncio.sleep(STOP_POLL_S)
        if evaluating is not None and evaluating.done():
            evaluating.result()
        if clock.now() - checked_at_s >= expiry_check_every_s:
            service.expire_leases()
            checked_at_s = clock.now()
    if evaluating is not None:
        evaluating.cancel()
    app.end_long_polls()
    server.should_exit = True
    await serving


def load_curriculum(config: LedgerJobConfig, paths: RunPaths) -> Curriculum:
    """The user's curriculum, told of every group that is over."""
    sys.path[:0] = [folder for folder in config.sys_path if folder not in sys.path]
    curriculum = Curriculum(
        paths.curriculum_draws,
        load_user_function(config.recipe.rollout.curriculum, RECIPE_KEY),
        n_tasks=config.n_train_tasks,
        batch_size=config.recipe.trainer.batch_size,
        seed=config.recipe.seed,
    )
    for ticket in read_sealed_tickets(paths):
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
    """Have the sets played on the weights that replicas load, then tell every cell to go.

    All starts of the ledger are of one generation, as the weights never change: what an earlier
    start was told of counts. `clock` is that of the service.
    """
    generations = paths.generations_dir
    generation = read_newest_number(generations) or claim_next_number(generations)
    opened = OpenTrainerGenerationRequest(
        generation, STEP_OF_LOADED_WEIGHTS, STEP_OF_LOADED_WEIGHTS
    )
    await service.open_generation(opened)
    request = EvaluateRequest(
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
    await service.finish_run(FinishRunRequest(generation))

"""Evaluation without a trainer: the ledger asks itself, then ends the run."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from areal_hpc.errors import AgentError
from areal_hpc.evaluation.ticket_numbers import STEP_OF_LOADED_WEIGHTS
from areal_hpc.ledger.long_poll import LongPoll
from areal_hpc.ledger.service import LedgerService
from areal_hpc.rundir.atomic import fsync_path
from areal_hpc.rundir.generations import claim_next_number, read_newest_number
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.ledger import EvaluateRequest, FinishRunRequest, OpenTrainerGenerationRequest

log = logging.getLogger(__name__)

POLL_S = 5.0


async def evaluate_and_finish(
    service: LedgerService,
    paths: RunPaths,
    n_tasks_by_set: Mapping[str, int],
    clock: Callable[[], float],
) -> None:
    """Have the sets played on the weights that replicas load, then tell every cell to go.

    All starts of the ledger are of one generation, as the weights never change: what an earlier
    start was told of counts. `clock` is that of the service.

    Raises:
        AgentError: The agent fails alike in the first tasks.
        OSError: The run directory cannot be written.
    """
    generations = paths.generations_dir
    generation = read_newest_number(generations) or claim_next_number(generations)
    patience = LongPoll(_receive_nothing_forever, clock, asyncio.get_running_loop().create_future())
    try:
        opened = OpenTrainerGenerationRequest(
            generation, STEP_OF_LOADED_WEIGHTS, STEP_OF_LOADED_WEIGHTS
        )
        await service.open_generation(opened, patience)
        request = EvaluateRequest(generation, STEP_OF_LOADED_WEIGHTS, dict(n_tasks_by_set), POLL_S)
        reply = await service.get_or_start_evaluation(request, patience)
        log.info("%d of %d tasks were done before", reply.done, reply.total)
        while reply.metrics is None and not reply.trouble:
            reply = await service.get_or_start_evaluation(request, patience)
        if reply.trouble:
            raise AgentError(reply.trouble, hint="fix it, and run the same command again")
        paths.finished_marker.touch()
        fsync_path(paths.finished_marker)
        fsync_path(paths.root)
        await service.finish_run_and_release_cells(FinishRunRequest(generation), patience)
    finally:
        patience.stop_disconnect_watch()


async def _receive_nothing_forever() -> Any:
    """What an HTTP caller would send, if there were one."""
    return await asyncio.get_running_loop().create_future()

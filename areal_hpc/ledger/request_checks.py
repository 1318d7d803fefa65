"""Checks of requests to the ledger: each raises `LedgerRequestError`, 400 or 409."""

from collections.abc import Mapping

from areal_hpc.errors import LedgerRequestError
from areal_hpc.wire.ledger import SealedTicket


def require_current_generation(generation: int, current_generation: int) -> None:
    if generation != current_generation:
        raise LedgerRequestError(
            409,
            f"this run is in generation {current_generation}, "
            f"the request came from generation {generation}",
            hint="stop this trainer: a newer one has taken over"
            if generation < current_generation
            else "call /open_generation first",
        )


def require_newest_generation(generation: int, newest_generation: int) -> None:
    if generation < newest_generation:
        raise LedgerRequestError(
            409,
            f"trainer generation {generation} was replaced by {newest_generation}",
            hint="stop this trainer: a newer one has taken over",
        )


def require_claimed_generation(generation: int, newest_generation: int) -> None:
    if not 1 <= generation <= newest_generation:
        raise LedgerRequestError(
            400,
            f"no trainer has taken generation {generation}: the newest one is {newest_generation}",
            hint="take the next number in generations/ first",
        )


def require_newest_job_start(cell: str, job_start: int, newest_start: int) -> None:
    if job_start < newest_start:
        raise LedgerRequestError(
            409,
            f"restart {job_start} of {cell} was replaced by restart {newest_start}",
            hint="stop this driver: a newer one has taken over",
        )


def require_valid_settle(ticket: SealedTicket) -> None:
    if len(ticket.rows) != len(ticket.rewards):
        raise LedgerRequestError(
            400,
            f"ticket {ticket.ref.ticket_id} of {ticket.shard} has {len(ticket.rows)} rows "
            f"and {len(ticket.rewards)} rewards",
            hint="send one reward per row",
        )
    if ticket.ref.eval_step >= 0:
        raise LedgerRequestError(
            400,
            f"{ticket.ref} is an evaluation ticket and cannot be settled",
            hint="send its rewards to /report_evaluation",
        )


def require_no_index_fault(ticket: SealedTicket, fault: str) -> None:
    if fault:
        raise LedgerRequestError(
            409,
            f"ticket {ticket.ref.ticket_id} of {ticket.shard} cannot be settled: {fault}",
            hint="areal-hpc shards verify compares index/ and shards/",
        )


def require_formed_step(step: int, formed_steps: int) -> None:
    if not 0 <= step <= formed_steps:
        raise LedgerRequestError(
            400,
            f"step {step} does not exist: batches 1 to {formed_steps} were handed out",
            hint="check that manifests/ and checkpoints/ belong to the same run",
        )


def require_next_step(step: int, formed_steps: int, total_steps: int) -> None:
    if step != formed_steps + 1 or step > total_steps:
        raise LedgerRequestError(
            400,
            f"there is no batch for step {step}: {formed_steps} of {total_steps} were handed out",
            hint="ask for the steps in order",
        )


def require_enough_tasks(
    requested_tasks_by_set: Mapping[str, int], tasks_by_set: Mapping[str, int]
) -> None:
    if not requested_tasks_by_set:
        raise LedgerRequestError(400, "cannot evaluate no set", hint="name one in `sets`")
    for name, n_tasks in requested_tasks_by_set.items():
        if name not in tasks_by_set:
            there = ", ".join(tasks_by_set) or "none"
            raise LedgerRequestError(400, f"no evaluation set {name!r}; there are: {there}")
        if not 1 <= n_tasks <= tasks_by_set[name]:
            raise LedgerRequestError(
                400, f"cannot evaluate {n_tasks} tasks of {name}: there are {tasks_by_set[name]}"
            )

"""The endless stream of tasks: which task and seed a ticket stands for. Pure functions."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from areal_hpc.wire.ledger import TicketGrant, TicketRef

_SEED_MASK = 2**31 - 1
"""Seeds are non-negative 31-bit integers: every engine and every JSON reader takes them."""


@lru_cache(maxsize=4)
def _order_of_pass(pass_number: int, n_tasks: int, seed: int) -> tuple[int, ...]:
    """The tasks of one pass, shuffled. Cached: re-issued tickets may still need the last pass."""
    order = list(range(n_tasks))
    random.Random(f"{seed}/{pass_number}").shuffle(order)
    return tuple(order)


def task_of(ticket_id: int, n_tasks: int, seed: int) -> int:
    """The task index of a training ticket.

    Ticket ids run through the task set in passes; each pass visits every task once, in its
    own seeded order, so the answer depends on nothing but the arguments.
    """
    pass_number, position = divmod(ticket_id, n_tasks)
    return _order_of_pass(pass_number, n_tasks, seed)[position]


def seed_of(stream: str, index: int, seed: int) -> int:
    """A seed for ticket `index` of the stream named `train` or `eval`, in [0, 2^31)."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK


@dataclass(frozen=True, slots=True)
class TaskStream:
    """Turns references into grants a driver can run."""

    n_train_tasks: int
    n_samples: int
    """Episodes of one training ticket."""
    seed: int

    def grant(self, ref: TicketRef) -> TicketGrant:
        """What to run for `ref`. An evaluation ticket is one episode with a fixed seed."""
        if ref.eval_step >= 0:
            return TicketGrant(ref, ref.ticket_id, seed_of("eval", ref.ticket_id, self.seed), 1)
        return TicketGrant(
            ref,
            task_of(ref.ticket_id, self.n_train_tasks, self.seed),
            seed_of("train", ref.ticket_id, self.seed),
            self.n_samples,
        )

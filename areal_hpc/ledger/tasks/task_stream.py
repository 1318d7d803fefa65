"""Endless task stream: the task and seed of each ticket."""

import contextlib
import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from areal_hpc.errors import AgentError
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.ledger.tasks.curriculum import Curriculum
from areal_hpc.wire.ledger import TicketGrant, TicketRef

_SEED_MASK = 2**31 - 1
"""Seeds are non-negative 31-bit integers: every engine and every JSON reader takes them."""
MAX_MIX_BLOCK_TICKETS = 1000
"""Weights are kept to one part in so many."""
SHARE_TOLERANCE = 1e-6
"""Weights such as 0.1 are no exact fractions in a computer."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """A part of the task set, and its share of the tickets relative to the other parts."""

    n_tasks: int
    weight: float = 1.0


@lru_cache(maxsize=64)
def _shuffle_pass(pass_number: int, n_tasks: int, seed: int | str) -> tuple[int, ...]:
    order = list(range(n_tasks))
    random.Random(f"{seed}/{pass_number}").shuffle(order)
    return tuple(order)


def get_task_index(ticket_id: int, n_tasks: int, seed: int | str) -> int:
    """The task index of a training ticket.

    Ticket ids run through the task set in passes; each pass visits every task once, in its
    own seeded order.
    """
    pass_number, position = divmod(ticket_id, n_tasks)
    return _shuffle_pass(pass_number, n_tasks, seed)[position]


@lru_cache(maxsize=8)
def count_block_tickets_by_source(sources: tuple[TaskSource, ...]) -> tuple[int, ...]:
    """Number of a block's tickets that each source gets: at least one.

    A block is as short as the weights allow (two equal sources take turns within every two), and
    of about a thousand tickets if no shorter one gives them exactly.
    """
    total = sum(source.weight for source in sources)
    for block in range(len(sources), MAX_MIX_BLOCK_TICKETS):
        exact = [block * source.weight / total for source in sources]
        if all(share > 0.5 and abs(share - round(share)) < SHARE_TOLERANCE for share in exact):
            return tuple(round(share) for share in exact)
    return tuple(max(1, round(MAX_MIX_BLOCK_TICKETS * source.weight / total)) for source in sources)


@lru_cache(maxsize=8)
def _shuffle_block_sources(block: int, shares: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Which source each ticket of a block takes its task from, shuffled."""
    order = [source for source, share in enumerate(shares) for _ in range(share)]
    random.Random(f"{seed}/sources/{block}").shuffle(order)
    return tuple(order)


def get_mixed_task_index(ticket_id: int, sources: tuple[TaskSource, ...], seed: int) -> int:
    """The task index of a training ticket when there are several sources.

    Tickets come in blocks in which each source has its share; a source's own tickets run through
    its tasks in passes.
    """
    shares = count_block_tickets_by_source(sources)
    block, place = divmod(ticket_id, sum(shares))
    order = _shuffle_block_sources(block, shares, seed)
    source = order[place]
    number = block * shares[source] + order[:place].count(source)
    first_task = sum(one.n_tasks for one in sources[:source])
    return first_task + get_task_index(number, sources[source].n_tasks, f"{seed}/{source}")


def derive_seed(stream: str, index: int, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK


@dataclass(frozen=True, slots=True)
class TaskStream:
    """Turns references into grants a driver can run."""

    sources: tuple[TaskSource, ...]
    """The training set, part by part."""
    episodes_per_ticket: int
    """Episodes started for a training ticket."""
    seed: int
    curriculum: Curriculum | None = None
    """Chooses the tasks in place of the passes."""
    samples_by_set: Mapping[int, int] = field(default_factory=dict)
    """Number of an evaluation set -> episodes of its tickets, where that is more than 1."""

    def build_grants(self, refs: Sequence[TicketRef]) -> list[TicketGrant]:
        """What to run for each, as far as the curriculum could draw tasks (`trouble`)."""
        grants: list[TicketGrant] = []
        with contextlib.suppress(AgentError):
            for ref in refs:
                grants.append(self.build_ticket_grant(ref))
        return grants

    def build_ticket_grant(self, ref: TicketRef) -> TicketGrant:
        """What to run for `ref`. An evaluation ticket has a fixed seed."""
        if ref.eval_step >= 0:
            number, task = split_ticket_id(ref.ticket_id)
            seed = derive_seed("eval", ref.ticket_id, self.seed)
            return TicketGrant(ref, task, seed, self.samples_by_set.get(number, 1))
        if self.curriculum is not None:
            task = self.curriculum.choose_task(ref.ticket_id)
        elif len(self.sources) == 1:
            task = get_task_index(ref.ticket_id, self.sources[0].n_tasks, self.seed)
        else:
            task = get_mixed_task_index(ref.ticket_id, self.sources, self.seed)
        seed = derive_seed("train", ref.ticket_id, self.seed)
        return TicketGrant(ref, task, seed, self.episodes_per_ticket)

    def record_rewards(self, ticket_id: int, rewards: Sequence[float]) -> None:
        if self.curriculum is not None:
            self.curriculum.record_rewards(ticket_id, rewards)

    @property
    def trouble(self) -> str:
        return self.curriculum.trouble if self.curriculum else ""

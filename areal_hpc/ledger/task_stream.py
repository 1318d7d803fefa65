"""Task stream: task and seed of each ticket, by passes over the task set or by a curriculum.

A curriculum chooses tasks by how they went so far: the user's function weighs them, the ledger
draws. Tasks are drawn for a batch's worth of tickets at a time, from what is known when the first
of them is issued, and written down before one is: a ticket stands for the same task ever after.
"""

import contextlib
import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.errors import AgentError
from areal_hpc.evaluation.set_names import split_ticket_id
from areal_hpc.rundir.jsonl import append_line, read_readable_records
from areal_hpc.wire.ledger import TicketGrant, TicketRef

log = logging.getLogger(__name__)

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


CURRICULUM_KEY = "rollout.curriculum"

WeighTasks = Callable[[dict[str, Any]], Any]
"""Given what `Curriculum` says of the tasks, a weight for each; see docs/admission.md."""


class DrawnTasks(msgspec.Struct, frozen=True):
    """The tasks of the tickets from `first_ticket` on."""

    first_ticket: int
    tasks: list[int]


class Curriculum:
    """Which task a ticket stands for. Draws with the run's seed, so only `weigh` is free.

    What was drawn is written to `path`, and taken up from there after a restart.
    """

    def __init__(
        self, path: Path, weigh: WeighTasks, *, n_tasks: int, batch_size: int, seed: int
    ) -> None:
        self._path = path
        self._weigh = weigh
        self._batch_size = batch_size
        self._seed = seed
        self.trouble = ""
        """Why nothing more can be drawn, in words for the user."""
        self._tasks: dict[int, int] = {}  # by ticket
        # By first ticket: a write that failed may have left the line, which then counts.
        self._unwritten: dict[int, DrawnTasks] = {}
        for drawn in read_readable_records(path, DrawnTasks):
            self._assign_tasks_to_tickets(drawn)
        self._groups = np.zeros(n_tasks, np.int64)
        self._reward = np.full(n_tasks, np.nan, np.float32)
        self._newest = np.full(n_tasks, -1, np.int64)  # the ticket whose reward that is
        self._noted: set[int] = set()

    def choose_task(self, ticket_id: int) -> int:
        """The task of a ticket; an AgentError once the user's function failed: see `trouble`."""
        if ticket_id not in self._tasks:
            if self.trouble:
                raise AgentError(self.trouble)
            first_ticket = ticket_id - ticket_id % self._batch_size
            drawn = self._unwritten.get(first_ticket) or self._draw_tasks(first_ticket)
            self._unwritten[first_ticket] = drawn
            append_line(self._path, drawn, sync=True)
            self._assign_tasks_to_tickets(self._unwritten.pop(first_ticket))
        return self._tasks[ticket_id]

    def record_rewards(self, ticket_id: int, rewards: Sequence[float]) -> None:
        """A group is over; repeats change nothing, nor does the order."""
        task = self._tasks.get(ticket_id)
        if task is None or ticket_id in self._noted or not rewards:
            return
        self._noted.add(ticket_id)
        self._groups[task] += 1
        if ticket_id > self._newest[task]:
            self._newest[task] = ticket_id
            self._reward[task] = np.mean(rewards)

    def _assign_tasks_to_tickets(self, drawn: DrawnTasks) -> None:
        for ticket_id, task in enumerate(drawn.tasks, drawn.first_ticket):
            self._tasks.setdefault(ticket_id, task)

    def _draw_tasks(self, first_ticket: int) -> DrawnTasks:
        weights = self._compute_weights(first_ticket)
        weights = weights / weights.max()  # their sum may be more than a float holds
        chances = weights / weights.sum()  # which may be 0 where a weight was not
        draws = np.random.default_rng([self._seed, first_ticket]).choice(
            len(chances),
            size=self._batch_size,
            replace=int(np.count_nonzero(chances)) < self._batch_size,
            p=chances,
        )
        return DrawnTasks(first_ticket, draws.tolist())

    def _compute_weights(self, first_ticket: int) -> npt.NDArray[np.float64]:
        known = {
            "ticket": first_ticket,
            "groups": self._groups.copy(),
            "reward": self._reward.copy(),
        }
        try:
            return validate_weights(self._weigh(known), len(self._groups))
        except Exception as error:  # boundary: the function is the user's code
            log.exception("%s failed at ticket %d", CURRICULUM_KEY, first_ticket)
            self.trouble = f"{CURRICULUM_KEY}: {type(error).__name__}: {error}"
            raise AgentError(self.trouble) from error


def validate_weights(weights: object, n_tasks: int) -> npt.NDArray[np.float64]:
    """Weights as an array; ValueError unless they are a number of at least 0 a task, not all 0."""
    expected = f"expected {n_tasks} numbers of at least 0, and one above it"
    array = np.asarray(weights, dtype=np.float64)
    if array.shape != (n_tasks,):
        raise ValueError(f"got weights of shape {array.shape}, {expected}")
    if not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        raise ValueError(f"got weights from {array.min()} to {array.max()}, {expected}")
    return array


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

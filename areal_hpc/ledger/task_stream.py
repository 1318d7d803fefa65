"""Task stream: task and seed of each ticket, by passes over the task set or by a curriculum.

A curriculum chooses tasks by their rewards so far: the user's function weighs them, the ledger
draws. It draws tasks for a batch of tickets at once, when the first of them is issued, and writes
them to disk before, so that a ticket keeps its task.
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
"""Mask of seeds: every engine and every JSON reader accepts non-negative 31-bit integers."""
MAX_MIX_BLOCK_TICKETS = 1000
"""Maximum number of tickets in a block, which is the precision of weights."""
SHARE_TOLERANCE = 1e-6
"""Tolerance of shares, because weights such as 0.1 are not exact in binary."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Part of the task set, and its share of the tickets relative to the other parts."""

    n_tasks: int
    weight: float = 1.0


@lru_cache(maxsize=64)
def _shuffle_pass(pass_number: int, n_tasks: int, seed: int | str) -> tuple[int, ...]:
    order = list(range(n_tasks))
    random.Random(f"{seed}/{pass_number}").shuffle(order)
    return tuple(order)


def get_task_index(ticket_id: int, n_tasks: int, seed: int | str) -> int:
    """Return the task index of a training ticket.

    Ticket ids run through the task set in passes; each pass visits every task once, in its
    own seeded order.
    """
    pass_number, position = divmod(ticket_id, n_tasks)
    return _shuffle_pass(pass_number, n_tasks, seed)[position]


@lru_cache(maxsize=8)
def count_block_tickets_by_source(sources: tuple[TaskSource, ...]) -> tuple[int, ...]:
    """Count the tickets of each source in a block, at least one.

    A block is as short as the weights allow (for two equal sources it has two tickets), and has
    about a thousand tickets if no shorter one gives the weights exactly.
    """
    total = sum(source.weight for source in sources)
    for block in range(len(sources), MAX_MIX_BLOCK_TICKETS):
        exact = [block * source.weight / total for source in sources]
        if all(share > 0.5 and abs(share - round(share)) < SHARE_TOLERANCE for share in exact):
            return tuple(round(share) for share in exact)
    return tuple(max(1, round(MAX_MIX_BLOCK_TICKETS * source.weight / total)) for source in sources)


@lru_cache(maxsize=8)
def _shuffle_block_sources(block: int, shares: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Shuffle the sources of a block's tickets."""
    order = [source for source, share in enumerate(shares) for _ in range(share)]
    random.Random(f"{seed}/sources/{block}").shuffle(order)
    return tuple(order)


def get_mixed_task_index(ticket_id: int, sources: tuple[TaskSource, ...], seed: int) -> int:
    """Return the task index of a training ticket with several sources.

    Each source has its share of tickets in every block, and its tickets run through its tasks in
    passes.
    """
    shares = count_block_tickets_by_source(sources)
    block, position = divmod(ticket_id, sum(shares))
    order = _shuffle_block_sources(block, shares, seed)
    source = order[position]
    number = block * shares[source] + order[:position].count(source)
    first_task = sum(earlier.n_tasks for earlier in sources[:source])
    return first_task + get_task_index(number, sources[source].n_tasks, f"{seed}/{source}")


def derive_seed(stream: str, index: int, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{stream}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK


CURRICULUM_KEY = "rollout.curriculum"

WeighTasks = Callable[[dict[str, Any]], Any]
"""Function from the records of tasks to a weight for each task; see docs/admission.md."""


class DrawnTasks(msgspec.Struct, frozen=True):
    """Tasks of the tickets from `first_ticket` on."""

    first_ticket: int
    tasks: list[int]


class Curriculum:
    """Curriculum, which draws the tasks of tickets by weights of `weigh` and the run's seed.

    Drawn tasks are written to `path`, and read from there after a restart.
    """

    def __init__(
        self, path: Path, weigh: WeighTasks, *, n_tasks: int, batch_size: int, seed: int
    ) -> None:
        self._path = path
        self._weigh = weigh
        self._batch_size = batch_size
        self._seed = seed
        self.trouble = ""
        """Reason why no more tasks can be drawn, as a text for the user."""
        self._tasks: dict[int, int] = {}  # by ticket
        # By first ticket; a failed write may have left the line, which a restart would read.
        self._unwritten: dict[int, DrawnTasks] = {}
        for drawn in read_readable_records(path, DrawnTasks):
            self._assign_tasks_to_tickets(drawn)
        self._groups = np.zeros(n_tasks, np.int64)
        self._reward = np.full(n_tasks, np.nan, np.float32)
        self._newest = np.full(n_tasks, -1, np.int64)  # the ticket of that reward
        self._noted: set[int] = set()

    def choose_task(self, ticket_id: int) -> int:
        """Return a ticket's task; raise AgentError after the user's function failed (`trouble`)."""
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
        """Record a finished group; repeats and the order of calls change nothing."""
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
        weights = weights / weights.max()  # the sum of large weights would overflow
        chances = weights / weights.sum()  # tiny weights may become 0
        draws = np.random.default_rng([self._seed, first_ticket]).choice(
            len(chances),
            size=self._batch_size,
            replace=int(np.count_nonzero(chances)) < self._batch_size,
            p=chances,
        )
        return DrawnTasks(first_ticket, draws.tolist())

    def _compute_weights(self, first_ticket: int) -> npt.NDArray[np.float64]:
        records = {
            "ticket": first_ticket,
            "groups": self._groups.copy(),
            "reward": self._reward.copy(),
        }
        try:
            return validate_weights(self._weigh(records), len(self._groups))
        except Exception as error:  # boundary: the function is the user's code
            log.exception("%s failed at ticket %d", CURRICULUM_KEY, first_ticket)
            self.trouble = f"{CURRICULUM_KEY}: {type(error).__name__}: {error}"
            raise AgentError(self.trouble) from error


def validate_weights(weights: object, n_tasks: int) -> npt.NDArray[np.float64]:
    """Return weights as an array; ValueError unless all are finite, none below 0, and one above."""
    expected = f"expected {n_tasks} numbers of at least 0, and one above it"
    array = np.asarray(weights, dtype=np.float64)
    if array.shape != (n_tasks,):
        raise ValueError(f"got weights of shape {array.shape}, {expected}")
    if not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        raise ValueError(f"got weights from {array.min()} to {array.max()}, {expected}")
    return array


@dataclass(frozen=True, slots=True)
class TaskStream:
    """Stream of tasks and seeds, from which tickets become grants that a driver can run."""

    sources: tuple[TaskSource, ...]
    """Parts of the training set, in their order."""
    episodes_per_ticket: int
    """Number of episodes started for a training ticket."""
    seed: int
    curriculum: Curriculum | None = None
    """Curriculum that draws the tasks, instead of passes."""
    samples_by_set: Mapping[int, int] = field(default_factory=dict)
    """Episodes of an evaluation set's tickets, by the set's number; by default 1."""

    def build_grants(self, refs: Sequence[TicketRef]) -> list[TicketGrant]:
        """Build grants for tickets, up to the first whose task cannot be drawn (`trouble`)."""
        grants: list[TicketGrant] = []
        with contextlib.suppress(AgentError):
            for ref in refs:
                grants.append(self.build_ticket_grant(ref))
        return grants

    def build_ticket_grant(self, ref: TicketRef) -> TicketGrant:
        """Build the grant for a ticket; an evaluation ticket has the same seed at all steps."""
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

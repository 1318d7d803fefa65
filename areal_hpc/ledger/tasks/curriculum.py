"""Tasks chosen by how they went so far: the user's function weighs them, the ledger draws.

Tasks are drawn for a batch's worth of tickets at a time, from what is known when the first of
them is issued, and written down before one is: a ticket stands for the same task ever after.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.errors import AgentError
from areal_hpc.rundir.jsonl import append_line, read_readable_records

log = logging.getLogger(__name__)

RECIPE_KEY = "rollout.curriculum"

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
            log.exception("%s failed at ticket %d", RECIPE_KEY, first_ticket)
            self.trouble = f"{RECIPE_KEY}: {type(error).__name__}: {error}"
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

"""Ticket leases and cell heartbeats, without I/O or clock: callers pass the time."""

from collections import OrderedDict, defaultdict
from collections.abc import Container
from dataclasses import dataclass
from itertools import takewhile

from areal_hpc.errors import LedgerRequestError
from areal_hpc.wire.ledger import LeaseRequest


@dataclass(slots=True)
class Lease:
    cell: str
    attempt: int
    newest_attempt: int
    """Highest attempt ever issued of the ticket; the next one must be above it."""
    seen_at_s: float
    """Time at which the cell last reported it."""


class LeaseTable:
    """Leases by ticket id, in the order of their last reports."""

    def __init__(self) -> None:
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        self._of_cell: defaultdict[str, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, ticket_id: object) -> bool:
        return ticket_id in self._leases

    def add(self, ticket_id: int, lease: Lease) -> None:
        self.pop(ticket_id)
        self._leases[ticket_id] = lease
        self._of_cell[lease.cell].add(ticket_id)

    def touch(self, ticket_id: int, cell: str, attempt: int, now_s: float) -> bool:
        """Renew a lease of this cell and attempt; return False if there is none."""
        lease = self._leases.get(ticket_id)
        if lease is None or lease.attempt != attempt or lease.cell != cell:
            return False
        lease.seen_at_s = now_s
        self._leases.move_to_end(ticket_id)
        return True

    def get(self, ticket_id: int) -> Lease | None:
        return self._leases.get(ticket_id)

    def has_any_of_cell(self, cell: str) -> bool:
        return bool(self._of_cell[cell])

    def pop(self, ticket_id: int) -> Lease | None:
        lease = self._leases.pop(ticket_id, None)
        if lease is not None:
            self._of_cell[lease.cell].discard(ticket_id)
        return lease

    def pop_unreported(self, cell: str, reported: Container[int]) -> list[tuple[int, Lease]]:
        missing = sorted(id_ for id_ in self._of_cell[cell] if id_ not in reported)
        return [(id_, lease) for id_ in missing if (lease := self.pop(id_))]

    def pop_silent(self, before_s: float) -> list[tuple[int, Lease]]:
        """Remove the leases last reported before `before_s`, and return them, oldest first."""
        silent = list(takewhile(lambda item: item[1].seen_at_s < before_s, self._leases.items()))
        for ticket_id, _ in silent:
            self.pop(ticket_id)
        return silent


MIN_HEARTBEAT_INTERVAL_S = 0.25
MAX_HEARTBEATS_PER_S = 1000
"""Maximum rate of all cells together, which leaves most of the ledger's core for tickets."""


class CellHeartbeats:
    """Last heartbeat of each cell, with its time and the start of the cell's job that sent it.

    It sums the time of cells without a ticket, between two heartbeats in a row that report none.
    """

    def __init__(self) -> None:
        self._heard_at_s: dict[str, float] = {}
        self._idle_since_s: dict[str, float] = {}
        """Times of the last heartbeats that reported no ticket, by cell."""
        self._idle_s = 0.0
        self._job_starts: dict[str, int] = {}
        self._newest: dict[str, LeaseRequest] = {}

    def __len__(self) -> int:
        return len(self._heard_at_s)

    @property
    def heartbeat_interval_s(self) -> float:
        return max(MIN_HEARTBEAT_INTERVAL_S, len(self) / MAX_HEARTBEATS_PER_S)

    @property
    def ended_episodes_of_open_tickets(self) -> int:
        return sum(self._newest[cell].ended_episodes for cell in self._heard_at_s)

    @property
    def oldest_running_episode_s(self) -> float:
        return max((self._newest[cell].slowest_episode_s for cell in self._heard_at_s), default=0.0)

    @property
    def episode_slots(self) -> int:
        return sum(self._newest[cell].slots for cell in self._heard_at_s)

    def record(self, request: LeaseRequest, now_s: float) -> None:
        """Record a cell's heartbeat, and refuse it if a later start of its job has sent one."""
        newest = self._job_starts.get(request.cell, 0)
        if request.job_start < newest:
            raise LedgerRequestError(
                409,
                f"restart {request.job_start} of {request.cell} was replaced by restart {newest}",
                hint="stop this driver: a newer one has taken over",
            )
        self._job_starts[request.cell] = request.job_start
        self._heard_at_s[request.cell] = now_s
        self._newest[request.cell] = request
        idle_since_s = self._idle_since_s.pop(request.cell, now_s)
        if not request.held:
            self._idle_s += now_s - idle_since_s
            self._idle_since_s[request.cell] = now_s

    def pop_idle_s(self) -> float:
        idle_s, self._idle_s = self._idle_s, 0.0
        return idle_s

    def forget_silent_cells(self, before_s: float) -> None:
        """Forget the cells without a heartbeat since `before_s`."""
        heartbeats = self._heard_at_s.items()
        self._heard_at_s = {cell: at_s for cell, at_s in heartbeats if at_s >= before_s}
        idle_cells = self._idle_since_s.items()
        self._idle_since_s = {cell: at_s for cell, at_s in idle_cells if cell in self._heard_at_s}

"""The cells that the ledger hears of. Pure: time is passed in."""

from __future__ import annotations

from areal_hpc.ledger.refusal import refuse_superseded_cell
from areal_hpc.wire.ledger import LeaseRequest

SOONEST_S = 0.25
HEARTBEATS_PER_S = 1000
"""Of all cells together, so that most of the ledger's core stays for tickets."""


class Cells:
    """When each cell was last heard of, and in which start of its job."""

    def __init__(self) -> None:
        self._heard_at_s: dict[str, float] = {}
        self._job_starts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._heard_at_s)

    @property
    def pause_s(self) -> float:
        """Seconds between two heartbeats of a busy cell, so that those of all cells are few."""
        return max(SOONEST_S, len(self) / HEARTBEATS_PER_S)

    def hear(self, request: LeaseRequest, now_s: float) -> None:
        """Take a cell's sign of life.

        Raises:
            Refused: 409: a later start of the cell's job has been heard.
        """
        newest = self._job_starts.get(request.cell, 0)
        refuse_superseded_cell(request.cell, request.job_start, newest)
        self._job_starts[request.cell] = request.job_start
        self._heard_at_s[request.cell] = now_s

    def forget_silent(self, before_s: float) -> None:
        """Count no cell that has not been heard of since `before_s`."""
        heard = self._heard_at_s.items()
        self._heard_at_s = {
            cell: heard_at_s for cell, heard_at_s in heard if heard_at_s >= before_s
        }

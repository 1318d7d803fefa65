"""Replicas of an update and its result. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal_hpc.errors import WeightSyncError
from areal_hpc.wire.weight_version import WeightVersion


@dataclass(frozen=True, slots=True)
class ReplicaKey:
    """One start of one SGLang server. A restarted server, or control proxy, has another key."""

    cell: str
    index: int
    incarnation: int
    tp: int
    """Ranks it brings into an update group."""
    control_url: str
    control_started_at: float

    @property
    def place(self) -> tuple[str, int]:
        """Which replica of which cell, whatever its incarnation."""
        return self.cell, self.index

    def __str__(self) -> str:
        return f"replica {self.index} of {self.cell} (incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The outcome of one `Publisher.publish`."""

    version: WeightVersion
    ok: tuple[ReplicaKey, ...]
    """Verified and open to agents."""
    failed: dict[ReplicaKey, WeightSyncError]
    """Left out of service; `Publisher.outdated` names them again for a full resend."""
    size_bytes: int
    """Bytes of all parameters (sent once to each group)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time of the phases, see docs/weights.md; sampling stands still from `pause_call` on."""

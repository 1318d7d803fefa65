"""The error of a checkpoint that the storage did not take. No torch: writers import it."""

from __future__ import annotations

from pathlib import Path

from areal_hpc.errors import ClusterError


def build_checkpoint_error(path: Path, reason: object) -> ClusterError:
    """Says which checkpoint, why, and what to do."""
    return ClusterError(
        f"a commit could not be written: {reason}",
        key=str(path),
        hint="make room on the shared storage, or check its quota with lfs quota or quota -s",
    )

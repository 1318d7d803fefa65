"""How trajectories are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from areal_hpc.config import StageConfig


class ShardConfig(StageConfig):
    """Journal and sealed shards."""

    target_bytes: Annotated[int, Field(ge=4096)] = 128 * 1024 * 1024
    """Seal once the journal holds this much. Large files are kind to Lustre metadata servers."""
    seal_after_s: Annotated[float, Field(gt=0)] = 30.0
    """Seal this long after the first finished ticket, full or not."""
    sync_interval_s: Annotated[float, Field(ge=0)] = 0.05
    """Group journal records into one fdatasync at most this far apart."""
    journal_dir: Path | None = None
    """Node-local folder of journals; `$SLURM_TMPDIR` or the system's temporary folder when null."""

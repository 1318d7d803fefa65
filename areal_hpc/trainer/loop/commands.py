"""What rank 0 tells all ranks to do next. Ranks act on nothing else."""

from __future__ import annotations

from msgspec import Struct

from areal_hpc.trainer.metrics import Line
from areal_hpc.wire.ledger import BatchManifest


class Train(Struct, frozen=True, tag=True):
    """Take one step on this batch."""

    manifest: BatchManifest


class Publish(Struct, frozen=True, tag=True):
    """Export the weights; rank 0 sends them to replicas."""


class Commit(Struct, frozen=True, tag=True):
    """Begin to make the work so far durable."""

    line: Line
    """Metrics of the step, unfinished."""


class Export(Struct, frozen=True, tag=True):
    """Write the weights as a Hugging Face model."""


class Idle(Struct, frozen=True, tag=True):
    """Nothing to do yet."""


class Stop(Struct, frozen=True, tag=True):
    """Leave the loop."""

    finished: bool
    """Every step has been trained, committed and exported."""


Command = Train | Publish | Commit | Export | Idle | Stop

"""Mark of a cancelled run: its jobs that are told to stop end, and are not started again."""

import logging
from pathlib import Path

log = logging.getLogger(__name__)

_WITHOUT_CHECKPOINT = "without a last checkpoint"


def mark_cancelled(marker_file: Path, *, without_checkpoint: bool = False) -> None:
    """Mark a run as cancelled, before its jobs are told to stop."""
    marker_file.write_text(_WITHOUT_CHECKPOINT if without_checkpoint else "")


def is_cancelled(marker_file: Path) -> bool:
    """True if a run is marked so. A storage that does not respond keeps no job from going on."""
    try:
        return marker_file.exists()
    except OSError as error:
        log.warning("shared storage does not respond: %s", error)
        return False


def is_cancelled_without_checkpoint(marker_file: Path) -> bool:
    """True if a run is marked so, and its jobs are to end without another checkpoint."""
    try:
        return marker_file.read_text() == _WITHOUT_CHECKPOINT
    except FileNotFoundError:
        return False
    except OSError as error:
        log.warning("shared storage does not respond: %s", error)
        return False

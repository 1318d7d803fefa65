"""Current state of a run from its directory and ledger."""

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC, read_metrics
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.events import read_recent_events
from areal_hpc.wire.ledger import Empty, LedgerStatus


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    steps: tuple[dict[str, Any], ...]
    """Rows of `metrics.jsonl`, oldest first."""
    sft: tuple[dict[str, Any], ...]
    """Rows of `sft_metrics.jsonl`, oldest first."""
    ledger: LedgerStatus | None
    """None while the ledger does not answer."""

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        rows = [(row["step"], row.get(VALIDATION_REWARD_METRIC)) for row in self.steps]
        return [(step, reward) for step, reward in rows if reward is not None]


def read_run_snapshot(paths: RunPaths, *, ask_ledger: bool = False) -> RunSnapshot:
    return RunSnapshot(
        tuple(read_metrics(paths.metrics)),
        tuple(read_readable_records(paths.sft_metrics)),
        _fetch_ledger_status(paths) if ask_ledger else None,
    )


class SnapshotReader:
    """Looks at a run again and again: files of steps are parsed anew only once they have changed.

    They grow with the run, and whoever shows progress looks every second.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._stamps: list[tuple[int, ...]] = []
        self._snapshot = RunSnapshot((), (), None)

    def read(self, *, ask_ledger: bool = False) -> RunSnapshot:
        stamps = [_read_stamp(self._paths.metrics), _read_stamp(self._paths.sft_metrics)]
        if stamps != self._stamps:  # read before the files: what comes meanwhile is a change
            self._snapshot = read_run_snapshot(self._paths)
            self._stamps = stamps
        return replace(
            self._snapshot, ledger=_fetch_ledger_status(self._paths) if ask_ledger else None
        )


def _read_stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _fetch_ledger_status(paths: RunPaths) -> LedgerStatus | None:
    # Two HTTP libraries, that most commands do not need.
    from areal_hpc.rundir.service_client import ServiceClient

    try:
        key = rendezvous.read_service_key(paths.service_key)
        client = ServiceClient(paths.rendezvous_dir, rendezvous.LEDGER_SERVICE, key, timeout_s=0.5)
    except (OSError, RecipeError):  # damaged, or of another user's run, whose files may be read
        return None
    try:
        return client.call("/status", Empty(), LedgerStatus)
    except (OSError, ClusterError):
        return None  # starting, restarting or gone: the display shows what the files say
    finally:
        client.close()


def read_launches(paths: RunPaths) -> list[dict[str, Any]]:
    """Entries of `provenance.json`, oldest first; none where it is missing or damaged."""
    try:
        launches = json.loads(paths.provenance.read_bytes())["launches"]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    return [one for one in launches if isinstance(one, dict)] if isinstance(launches, list) else []


def list_launch_times(paths: RunPaths) -> list[tuple[int, float]]:
    """Attempts with the Unix times of their launches, oldest first."""
    times = []
    for one in read_launches(paths):
        with suppress(ValueError, LookupError, TypeError):
            at = datetime.fromisoformat(one["time"]).timestamp()
            times.append((int(one.get("attempt", 0)), at))
    return times


def read_last_launch_time(paths: RunPaths) -> float:
    """Unix time of the last `run` or `submit`; 0 if that was not written down."""
    times = list_launch_times(paths)
    return times[-1][1] if times else 0.0


def read_events_since_launch(paths: RunPaths) -> list[dict[str, Any]]:
    since = read_last_launch_time(paths)
    return [event for event in read_recent_events(paths.events) if event["time"] >= since]

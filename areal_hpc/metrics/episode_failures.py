"""Count of episodes' tries that failed, from the drivers' lines in `events.jsonl`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_hpc.rundir.jsonl import LineFollower, decode_readable_records

FAILED_TRY_EVENTS = frozenset({"episode_failed", "episode_timed_out"})
"""Events of a try that counts against its episode: outages of servers do not."""
MAX_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class FailureCounts:
    failed_tries: int = 0
    rewarded: int = 0
    """Those of them that earn a reward all the same."""


class EpisodeFailureCounter:
    """Follows the event log of a run from where it ends now; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFollower(path, from_end=True, max_bytes=MAX_READ_BYTES)

    def count_new_failed_tries(self) -> FailureCounts:
        try:
            content = self._lines.read_new_lines()
        except FileNotFoundError:
            return FailureCounts()
        events = decode_readable_records(content, dict[str, Any])
        failures = [event for event in events if is_failed_training_try(event)]
        return FailureCounts(len(failures), sum("reward" in event for event in failures))


def is_failed_training_try(event: dict[str, Any]) -> bool:
    return event.get("event") in FAILED_TRY_EVENTS and event.get("eval_step", -1) < 0

"""Count of episodes' tries that failed, from the drivers' lines in `events.jsonl`."""

from pathlib import Path
from typing import Any

from areal_hpc.rundir.jsonl import decode_lines

FAILURE_EVENTS = frozenset({"episode_failed", "episode_timed_out"})
"""Events of a try that counts against its episode: outages of servers do not."""
MAX_READ_BYTES = 16 << 20
"""Of what was appended since the last look; more than that is not read, and not counted."""


class EpisodeFailureCounter:
    """Follows the event log of a run from where it ends now; each line is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = self._get_size_bytes()

    def count_new(self) -> int:
        """Failed tries of training episodes since the last call."""
        new_bytes = self._get_size_bytes() - self._read_bytes
        if new_bytes <= 0:
            return 0
        with self._path.open("rb") as stream:
            stream.seek(self._read_bytes)
            content = stream.read(min(new_bytes, MAX_READ_BYTES))
        whole_bytes = content.rfind(b"\n") + 1  # the last line may still be in the writing
        self._read_bytes += whole_bytes if new_bytes <= MAX_READ_BYTES else new_bytes
        return sum(map(is_training_failure, decode_lines(content[:whole_bytes], dict[str, Any])))

    def _get_size_bytes(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0


def is_training_failure(event: dict[str, Any]) -> bool:
    """True for the event of a training episode's try that raised or took too long."""
    return event.get("event") in FAILURE_EVENTS and event.get("eval_step", -1) < 0

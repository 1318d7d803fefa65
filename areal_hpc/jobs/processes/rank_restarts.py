"""Restarts of all ranks within a living job, which supervisors agree on through notes.

A rank that dies breaks the collectives of all others, so all start again together. The supervisor
that sees a rank die writes the next numbered note, exclusively: one of them succeeds, and its rank
is the cause. All follow the note, each by killing its rank and starting it again.
"""

import os
import time
from pathlib import Path

import msgspec

from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.rundir.folders import make_folder
from areal_hpc.rundir.generations import get_number_path


class RankRestart(msgspec.Struct, frozen=True):
    """The note of one restart: why it came about."""

    task: int
    """Where the rank died that died first."""
    exit_code: int
    failures: int
    """Deaths in a row without progress, this one included."""


class RankRestartNotes:
    """The notes of one start of a job, as one of its supervisors follows them."""

    def __init__(self, folder: Path, poll_s: float) -> None:
        self._folder = folder
        self._poll_s = poll_s
        self._next_look_at = 0.0
        self.followed = 0
        """Restarts that this task has taken part in."""

    def read_next_restart(self, *, is_urgent: bool = False) -> RankRestart | None:
        """The next restart to take part in; None while there is none, or before the next look."""
        now = time.monotonic()
        if now < self._next_look_at and not is_urgent:
            return None
        self._next_look_at = now + self._poll_s
        try:
            content = get_number_path(self._folder, self.followed + 1).read_bytes()
        except FileNotFoundError:
            return None
        if not content:  # it is empty for a moment
            return None
        note = msgspec.json.decode(content, type=RankRestart)
        self.followed += 1
        return note

    def announce_restart_if_first(self, restart_note: RankRestart) -> bool:
        """Have all tasks start their rank again; false if another task was first to say so."""
        make_folder(self._folder)
        path = get_number_path(self._folder, self.followed + 1)
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            return False
        write_atomic(path, msgspec.json.encode(restart_note))
        return True

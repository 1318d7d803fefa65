"""Log file of a server, written by threads of its parent.

A server that wrote into a file on shared storage would stand still with that storage: none of its
requests is answered then, and after `inference.health_timeout_s` it is taken for dead. It writes
into a pipe instead, which is emptied whatever the storage does.
"""

import logging
import os
import threading
from collections import deque
from contextlib import suppress
from io import FileIO
from pathlib import Path

from areal_hpc.rundir.folders import make_folder
from areal_hpc.shards.disk_io import write_all

log = logging.getLogger(__name__)

MAX_HELD_BYTES = 4 << 20
"""Output that waits for the storage, what is being written included; the rest is left out."""
_READ_BYTES = 1 << 16


class ServerLogPipe:
    """A pipe and the file that gets what is written into it, as soon as the storage takes it."""

    def __init__(self, path: Path) -> None:
        """Make the file, or go on with it."""
        make_folder(path.parent)
        self._path = path
        self._file: FileIO | None = self._open_file()
        self._held: deque[bytes] = deque()
        self._held_bytes = self._dropped_bytes = 0
        self._has_ended = False
        self._changed = threading.Condition()
        self._read_end, self.write_end = os.pipe()
        """`write_end` is for the server; here `begin` closes it."""
        self._writer = threading.Thread(
            target=self._write_held_until_end, name="server-log", daemon=True
        )

    def start_copying(self) -> None:
        """Empty the pipe from now on: the server has its end of it."""
        os.close(self.write_end)
        threading.Thread(
            target=self._read_pipe_until_end, name="server-output", daemon=True
        ).start()
        self._writer.start()

    def wait_until_written(self, timeout_s: float) -> None:
        self._writer.join(timeout_s)

    def _read_pipe_until_end(self) -> None:
        while piece := os.read(self._read_end, _READ_BYTES):
            with self._changed:
                if self._held_bytes + len(piece) > MAX_HELD_BYTES:
                    self._dropped_bytes += len(piece)
                else:
                    self._held.append(piece)
                    self._held_bytes += len(piece)
                self._changed.notify()
        os.close(self._read_end)
        with self._changed:
            self._has_ended = True
            self._changed.notify()

    def _open_file(self) -> FileIO:
        return self._path.open("ab", buffering=0)

    def _write_held_until_end(self) -> None:
        while pieces := self._wait_and_take_held():
            size_bytes = sum(map(len, pieces))
            try:
                self._file = self._file or self._open_file()
                write_all(self._file.fileno(), pieces)
            except OSError as error:
                log.error("%d bytes of %s were not written: %s", size_bytes, self._path, error)
                self._close_file()  # another one may be better: this one may be stale
            with self._changed:
                self._held_bytes -= size_bytes
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _wait_and_take_held(self) -> list[bytes]:
        with self._changed:
            self._changed.wait_for(lambda: self._held or self._has_ended)
            pieces = [*self._held]
            if self._dropped_bytes:
                note = f"\n({self._dropped_bytes} bytes left out: the storage took none)\n"
                pieces.append(note.encode())
                self._held_bytes += len(pieces[-1])
            self._held.clear()
            self._dropped_bytes = 0
            return pieces

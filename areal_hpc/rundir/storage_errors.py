"""Patience of a loop with shared storage that answers with errors for a while.

NFS says ESTALE or EIO while its server moves, or after another node has replaced a file. Whoever
looks after processes must not end them for that: the next look may do.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from areal_hpc.errors import ClusterError

log = logging.getLogger(__name__)

STORAGE_ERROR_LIMIT_S = 60.0
"""Errors may come for so long, and nothing else, until the storage counts as lost."""


class StorageErrorTolerance:
    """Passes over errors of the storage unless they go on for too long."""

    def __init__(
        self,
        limit_s: float = STORAGE_ERROR_LIMIT_S,
        *,
        read_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._read_s = read_s
        self._failing_since_s: float | None = None

    @contextmanager
    def tolerate(self) -> Iterator[None]:
        """Leave the block at an OSError, and go on behind it.

        Raises:
            ClusterError: Every block for `limit_s` has met one.
            BrokenPipeError: The block's own: nobody reads what it prints.
        """
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            now_s = self._read_s()
            if self._failing_since_s is None:
                self._failing_since_s = now_s
                log.warning("shared storage does not respond, trying again: %s", error)
            if now_s - self._failing_since_s > self._limit_s:
                raise ClusterError(
                    f"shared storage has answered with errors for {self._limit_s:.0f} s: {error}",
                    key=str(error.filename or ""),
                    hint="look whether the run directory can be read and written, then resume",
                ) from error
        else:
            self._failing_since_s = None

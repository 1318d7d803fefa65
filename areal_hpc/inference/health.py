"""Liveness probe of a server: one generated token now and then."""

from __future__ import annotations

import threading
import time

from areal_hpc.wire.http import is_accepted

PROBES_PER_TIMEOUT = 6
"""A server has several chances to answer before it counts as silent."""


class HealthProbe:
    """The last sign of life of one server.

    SGLang's `/health_generate` comes back after a second when any token left the scheduler
    since it was asked, and after 20 s, with an error, when none did (sglang 0.5.23,
    `srt/entrypoints/http_server.py`). A paused server says no, so it must not be asked.

    Args:
        url: Of the server, on loopback.
        timeout_s: Silence this long is death.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._probe: threading.Thread | None = None
        self._asked_at = self._alive_at = time.monotonic()

    def tick(self, *, may_ask: bool) -> bool:
        """Ask if it is time to; true once the server has been silent for too long.

        Args:
            may_ask: False while an update is under way: the server then need not answer, and
                its silence counts from the end of the update.
        """
        now = time.monotonic()
        if not may_ask:
            self._alive_at = now
            return False
        is_asking = self._probe is not None and self._probe.is_alive()
        if not is_asking and now >= self._asked_at + self._timeout_s / PROBES_PER_TIMEOUT:
            self._asked_at = now
            self._probe = threading.Thread(target=self._ask, name="pulse", daemon=True)
            self._probe.start()
        return now - self._alive_at > self._timeout_s

    def _ask(self) -> None:
        if is_accepted("GET", f"{self._url}/health_generate", self._timeout_s / 2):
            self._alive_at = time.monotonic()

"""Waits for other processes and threads."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from areal_hpc.rundir.rendezvous import ServiceEndpoint, find_endpoint
from tests.support.deadlines import Deadline


def wait_for(
    condition: Callable[[], object],
    within_s: float = 60.0,
    why: Callable[[], object] = str,
    *,
    every_s: float = 0.02,
) -> None:
    """Return once the condition holds; at the deadline fail with the result of `why`.

    A slower machine has longer.
    """
    deadline = Deadline(within_s)
    while not condition():
        assert not deadline.is_over(), f"not within {deadline.limit_s:.4g} s: {why()}"
        time.sleep(every_s)


def await_endpoint(
    directory: Path,
    service: str,
    within_s: float = 60.0,
    process: subprocess.Popen[bytes] | None = None,
) -> ServiceEndpoint:
    """Wait for a service to publish its endpoint, `process` if given."""
    endpoints: list[ServiceEndpoint] = []

    def is_published() -> bool:
        assert process is None or process.poll() is None, f"{service} ended at its start"
        endpoint = find_endpoint(directory, service)
        endpoints.extend([endpoint] if endpoint else [])
        return bool(endpoints)

    wait_for(is_published, within_s, lambda: service)
    return endpoints[0]


def communicate(process: subprocess.Popen[str], within_s: float | None = 60.0) -> tuple[str, str]:
    """Read a program's output until it ends; kill it if it does not end in time.

    Raises:
        subprocess.TimeoutExpired: It was.
    """
    deadline = None if within_s is None else Deadline(within_s)
    try:
        while True:
            try:
                left_s = None if deadline is None else max(deadline.left_s, 0.0)
                return process.communicate(timeout=left_s)
            except subprocess.TimeoutExpired:
                if deadline is None or deadline.is_over():
                    raise
    except BaseException:
        process.kill()
        raise


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        block = client.recv(1 << 16)
        assert block, received
        received += block
    return received

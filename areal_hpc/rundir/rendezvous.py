"""Service discovery: one endpoint file per live service on shared storage, mode 0600."""

import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.atomic import write_atomic_private

LEDGER_SERVICE = "ledger"
"""The service that every driver, proxy and trainer asks."""
RANK_STORE_SERVICE = "trainer-store"
"""The store through which the ranks of a trainer find one another."""
CELL_PREFIX = "cell-"
"""Names of the cells that play training tasks, and of their jobs, are this and a number."""
EVALUATION_CELL = "evaluation"
"""The name of the cell, and of its job, that plays nothing but held-out tasks."""


def format_cell_name(index: int) -> str:
    """The cell, and the job, that is number `index` among those of training."""
    return f"{CELL_PREFIX}{index}"


def is_cell_name(job: str) -> bool:
    """True of the jobs that are cells, that of evaluation included."""
    return job == EVALUATION_CELL or job.startswith(CELL_PREFIX)


def format_proxy_name(cell: str) -> str:
    """The service that records what the agents of a cell ask and get."""
    return f"proxy-{cell}"


def format_control_proxy_name(cell: str) -> str:
    """The service through which trainers reach the replicas of a cell."""
    return f"control-{cell}"


class ServiceEndpoint(msgspec.Struct, frozen=True):
    """Address of a live service. A restarted one overwrites its file with a new `started_at`."""

    name: str
    url: str
    host: str
    pid: int
    started_at: float


def publish_endpoint(directory: Path, name: str, url: str) -> ServiceEndpoint:
    """Tell the run that service `name` listens at `url`."""
    endpoint = ServiceEndpoint(name, url, socket.gethostname(), os.getpid(), time.time())
    write_atomic_private(directory / f"{name}.json", msgspec.json.encode(endpoint))
    return endpoint


def find_endpoint(directory: Path, name: str) -> ServiceEndpoint | None:
    """The endpoint of `name`, or None while it has not been published."""
    try:
        return msgspec.json.decode((directory / f"{name}.json").read_bytes(), type=ServiceEndpoint)
    except FileNotFoundError:
        return None


def await_endpoint(
    directory: Path,
    name: str,
    timeout_s: float,
    *,
    is_cancelled: Callable[[], bool] = lambda: False,
    poll_s: float = 0.1,
) -> ServiceEndpoint:
    """Wait until `name` is published.

    Raises:
        ClusterError: It did not appear in time, or `is_cancelled` became true.
    """
    give_up_at = time.monotonic() + timeout_s
    while (endpoint := find_endpoint(directory, name)) is None:
        if is_cancelled():
            raise ClusterError(f"stopped while waiting for {name}")
        if time.monotonic() >= give_up_at:
            raise ClusterError(
                f"{name} did not start within {timeout_s:.0f} s (no endpoint file in {directory})",
                hint=f"read the log of {name} in logs/latest",
            )
        time.sleep(poll_s)
    return endpoint


def remove_endpoint(directory: Path, name: str) -> None:
    """Remove the service's file when it stops on purpose; a successor's file stays."""
    endpoint = find_endpoint(directory, name)
    if endpoint and (endpoint.host, endpoint.pid) == (socket.gethostname(), os.getpid()):
        (directory / f"{name}.json").unlink(missing_ok=True)


def ensure_admin_key(path: Path) -> str:
    """The run's secret for control routes, made on first use."""
    if not path.exists():
        write_atomic_private(path, secrets.token_urlsafe(32).encode())
    return path.read_text()

"""The dashboard's server: one per user, on loopback, at an address that stays the same."""

import getpass
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node.topology import LOOPBACK_ADDRESS
from areal_hpc.view.dashboard.app import DashboardApp
from areal_hpc.view.dashboard.row_index import get_cache_dir, make_private_folder
from areal_hpc.wire.http_server import GuardedServer

MAX_CONNECTIONS = 200
_ADDRESS_FILE = "address.json"


class DashboardAddress(msgspec.Struct, frozen=True):
    """Where this user's server listens, and the secret of its pages."""

    port: int
    secret: str

    @property
    def url(self) -> str:
        """What a browser opens."""
        return f"http://{LOOPBACK_ADDRESS}:{self.port}/{self.secret}/"


def serve_dashboard(
    dir_with_runs: Path, port: int | None, print_line: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C; `print_line` hears the lines that say how to get there.

    Raises:
        ClusterError: The port is taken, or the cache is open to other users.
    """
    cache_dir = get_cache_dir()
    address, listener = _listen_at_kept_or_free_port(cache_dir, port)
    app = DashboardApp(dir_with_runs, address.secret, cache_dir)
    host = socket.gethostname()
    print_line(f"{dir_with_runs}: open {address.url}")
    print_line("from another machine, first:")
    login = f"{_get_user_name_or_placeholder()}@{host}"
    print_line(f"  ssh -L {address.port}:{LOOPBACK_ADDRESS}:{address.port} {login}")
    print_line("Ctrl-C stops this server, not the runs")
    with closing(listener), closing(app), suppress(KeyboardInterrupt):
        server = GuardedServer(app, MAX_CONNECTIONS, timeout_graceful_shutdown=2)
        app.is_ending = lambda: server.should_exit
        server.run(sockets=[listener])


def _get_user_name_or_placeholder() -> str:
    """The name of this user, or `USER` where the user id has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "USER"


def _listen_at_kept_or_free_port(
    cache_dir: Path, port: int | None
) -> tuple[DashboardAddress, socket.socket]:
    """This user's address and a socket that listens there; another port if that one is taken."""
    make_private_folder(cache_dir)
    kept = _read_address(cache_dir)
    problem: Exception | None = None
    for candidate in [port] if port is not None else [kept.port if kept else 0, 0]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK_ADDRESS, candidate))
        except (OSError, OverflowError) as error:
            listener.close()
            problem = error
            continue
        listener.listen(128)
        # Whoever has another port's address may listen there: a link to it tells them its secret.
        is_kept = kept is not None and kept.port == candidate
        secret = kept.secret if kept and is_kept else secrets.token_urlsafe(24)
        address = DashboardAddress(listener.getsockname()[1], secret)
        _write_address(cache_dir, address)
        return address, listener
    raise ClusterError(
        f"port {port} cannot be used: {problem}",
        key="--port",
        hint="leave --port out to get one that is free",
    )


def _read_address(cache_dir: Path) -> DashboardAddress | None:
    try:
        return msgspec.json.decode((cache_dir / _ADDRESS_FILE).read_bytes(), type=DashboardAddress)
    except (OSError, msgspec.DecodeError):
        return None


def _write_address(cache_dir: Path, address: DashboardAddress) -> None:
    path = cache_dir / _ADDRESS_FILE
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(address))

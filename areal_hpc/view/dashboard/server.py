"""The dashboard's server: one per user, on loopback, at a port that stays the same."""

import getpass
import secrets
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.jobs.node.topology import LOOPBACK_ADDRESS
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.view.dashboard.app import DashboardApp
from areal_hpc.view.transcripts.row_index import get_cache_dir, make_private_folder
from areal_hpc.wire.http_server import GuardedServer

MAX_CONNECTIONS = 200
_PORT_FILE = "port"


def serve_dashboard(
    dir_with_runs: Path, port: int | None, print_line: Callable[[str], None]
) -> None:
    cache_dir = get_cache_dir()
    listener = _listen(cache_dir, port)
    # New at each start: whoever listened here in between may have heard the last one.
    secret = secrets.token_urlsafe(24)
    host, own_port = socket.gethostname(), listener.getsockname()[1]
    app = DashboardApp(dir_with_runs, secret, cache_dir)
    print_line(f"{dir_with_runs}: open http://{LOOPBACK_ADDRESS}:{own_port}/{secret}/")
    print_line("from another machine, first:")
    user = "USER"
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    print_line(f"  ssh -L {own_port}:{LOOPBACK_ADDRESS}:{own_port} {user}@{host}")
    print_line("Ctrl-C stops this server, not the runs")
    with closing(listener), closing(app), suppress(KeyboardInterrupt):
        server = GuardedServer(app, MAX_CONNECTIONS, timeout_graceful_shutdown=2)
        app.is_ending = lambda: server.should_exit
        server.run(sockets=[listener])


def _listen(cache_dir: Path, port: int | None) -> socket.socket:
    make_private_folder(cache_dir)
    port_file, kept_port = cache_dir / _PORT_FILE, 0
    with suppress(OSError, ValueError):
        kept_port = int(port_file.read_bytes())
    problem: Exception | None = None
    for candidate in [port] if port is not None else [kept_port, 0]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK_ADDRESS, candidate))
        except (OSError, OverflowError) as error:
            listener.close()
            problem = error
            continue
        listener.listen(128)
        write_atomic_private(port_file, str(listener.getsockname()[1]).encode())
        return listener
    raise ClusterError(
        f"port {port} cannot be used: {problem}",
        key="--port",
        hint="leave --port out to get one that is free",
    )

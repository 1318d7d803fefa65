"""Replicas and control proxies with small programs in the place of SGLang."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.replica import BuildCommand, Replica
from areal_hpc.inference.server.command import ServerCommand, ServerPorts
from areal_hpc.jobs.restarts import RestartPolicy
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.replicas import ReplicaView
from areal_hpc.wire.service_key import derive_bearer_key, make_client_tls
from tests.support.deadlines import scaled
from tests.support.service_keys import SERVICE_KEY
from tests.support.waiting import wait_for

KEY = SERVICE_KEY
SERVER = """
import http.server, json, subprocess, sys, time
subprocess.Popen(
    ["sglang::scheduler", "-c", "import time; time.sleep(60)"], executable=sys.executable
)
subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({BYSTANDER_S})"])
class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_GET(self):
        if self.path == "/health_generate": time.sleep(HEALTH_S)
        self.answer(200, {})
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        print(f"asked {self.path} {body}", flush=True)
        time.sleep(POST_S)
        self.answer(POST_STATUS, {})
    def answer(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""
FACTS = {
    "BYSTANDER_S": 60.0,
    "HEALTH_S": 0.0,
    "POST_S": 0.0,
    "POST_STATUS": 200,
}


def server(before: str = "", **facts: float) -> BuildCommand:
    """One that answers like SGLang where its cell looks, and does something `before`."""
    lines = (f"{name} = {value}\n" for name, value in (FACTS | facts).items())
    return program(before + "".join(lines) + SERVER)


def program(text: str) -> BuildCommand:
    return lambda incarnation, ports: server_command(text, ports)


def server_command(text: str, ports: ServerPorts) -> ServerCommand:
    return ServerCommand((sys.executable, "-c", text, str(ports.http)))


def make_replica(
    folder: Path,
    launch: BuildCommand,
    *,
    nodes: int = 1,
    max_restarts: int = 3,
    healthy_s: float = 600,
    **timeouts: float,
) -> Replica:
    """The first of `cell-0`, which logs in a folder; not started. Timeouts may be of any length."""
    config = InferenceConfig(tp=nodes, nodes_per_replica=nodes)
    return Replica(
        0,
        config.model_copy(update={"startup_timeout_s": scaled(60), **timeouts}),
        launch=launch,
        log_dir=folder,
        events=EventLog(folder / "events.jsonl", "cell-0"),
        policy=RestartPolicy(max_restarts, healthy_s=healthy_s),
        clock=AwakeClock(),
    )


@contextmanager
def control_proxy(replica: Replica, folder: Path) -> Iterator[ControlProxyServer]:
    """The control proxy of a cell of one replica, whose weights are in `folder`/weights."""
    app = ControlProxyApp("cell-0", [replica], KEY, folder / "weights")
    key_file = folder / "services.pem"
    key_file.write_text(KEY)
    proxy = ControlProxyServer(app, "127.0.0.1", key_file)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def call(
    proxy: ControlProxyServer, route: str, body: object = None, timeout_s: float | None = None
) -> httpx.Response:
    """One call, as the trainer makes it to the first incarnation."""
    headers = {
        "x-areal-incarnation": "1",
        "x-areal-generation": "1",
        "x-areal-deadline-s": "100",
        "authorization": f"Bearer {derive_bearer_key(KEY, 'control-cell-0')}",
    }
    tls = make_client_tls(KEY)
    with httpx.Client(
        headers=headers, verify=tls, timeout=timeout_s or scaled(60), trust_env=False
    ) as client:
        return client.post(f"{proxy.url}/{route}", json=body or {})


def tick_until(replica: Replica, wanted: Callable[[ReplicaView], bool]) -> ReplicaView:
    def is_wanted() -> bool:
        if wanted(replica.build_view()):
            return True
        replica.maintain_server_once()
        return False

    wait_for(is_wanted, why=replica.build_view)
    return replica.build_view()


def is_ready(view: ReplicaView) -> bool:
    return view.state == "ready"


def tick_for(replica: Replica, seconds: float) -> None:
    stop_at = time.monotonic() + seconds
    while time.monotonic() < stop_at:
        replica.maintain_server_once()
        time.sleep(0.01)
    replica.maintain_server_once()

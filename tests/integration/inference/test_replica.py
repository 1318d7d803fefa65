"""Replicas of one node and of two start, fail and restart, with small programs as SGLang."""

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.multi_node import WorkerNode
from areal_hpc.inference.replica import BuildCommand, ControlCallerIdentity, Replica
from areal_hpc.inference.server import node_files
from areal_hpc.inference.server.command import NodeOptions, ServerCommand, ServerPorts
from areal_hpc.jobs.restarts import RestartPolicy
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_client_tls
from areal_hpc.rundir.telemetry.events import EventLog
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.replicas import FenceReplicaRequest, ReopenReplicaRequest, ReplicaView
from tests.support.deadlines import scaled
from tests.support.json_server import JsonHandler, serving_http
from tests.support.process_commands import command_of, is_scheduler
from tests.support.service_keys import SERVICE_KEY as KEY
from tests.support.waiting import wait_for

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
FACTS = {"BYSTANDER_S": 60.0, "HEALTH_S": 0.0, "POST_S": 0.0, "POST_STATUS": 200}


def server(before: str = "", **facts: float) -> BuildCommand:
    """Build a server that answers as SGLang does to its cell, after the code `before`."""
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
    """Make the first replica of `cell-0`, which logs in a folder, with timeouts of any length."""
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
    """Start the control proxy of a cell of one replica, whose weights are in `folder`/weights."""
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
    """Send one request, as the trainer does to the first incarnation."""
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


Make = Callable[..., Replica]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    replicas: list[Replica] = []

    def make(launch: BuildCommand, **options: Any) -> Replica:
        replicas.append(make_replica(tmp_path, launch, **options))
        return replicas[-1]

    yield make
    for replica in replicas:
        replica.request_stop()
        replica.kill()


def schedulers() -> list[psutil.Process]:
    return [*filter(is_scheduler, psutil.Process().children(True))]


def relay(replica: Replica, route: str, deadline_s: float) -> None:
    caller = ControlCallerIdentity(replica.build_view().incarnation, 1, deadline_s)
    replica.begin_control_call(caller, route)
    replica.finish_control_call(caller, route, True)


def test_only_lost_schedulers_replace_the_server_and_old_crashes_pass(make: Make) -> None:
    others = schedulers()  # of a server that this worker keeps for other files
    replica = make(server(BYSTANDER_S=0.3), max_restarts=1, healthy_s=0.3)
    for incarnation in (1, 2, 3):
        tick_until(replica, is_ready)
        tick_for(replica, 0.6)
        view = replica.build_view()
        assert (view.incarnation, view.state, view.version) == (incarnation, "ready", "")
        (child,) = (scheduler for scheduler in schedulers() if scheduler not in others)
        child.kill()
        tick_until(replica, lambda view: view.state == "starting")
    assert tick_until(make(server()), is_ready).incarnation == 4, "the next job goes on counting"


def test_what_a_server_leaves_in_temporary_folders_goes_with_it(make: Make, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    litter = f"""
import pathlib, tempfile
with open({str(notes)!r}, "a") as notes:
    print(tempfile.NamedTemporaryFile(delete=False).name, file=notes)
"""
    replica = make(server(litter))
    tick_until(replica, is_ready)
    folder = Path(notes.read_text().strip())
    assert folder.exists()
    replica.request_stop()
    replica.kill()
    assert not folder.parent.exists()


@pytest.mark.parametrize("then", ["raise SystemExit(3)", "import time; time.sleep(600)"])
def test_a_taken_port_is_no_crash(make: Make, then: str) -> None:
    text = f"print('[Errno 98] ... address already in use', flush=True); {then}"

    def launch(incarnation: int, ports: ServerPorts) -> ServerCommand:
        return (program(text) if incarnation < 3 else server())(incarnation, ports)

    replica = make(launch, max_restarts=0)
    assert tick_until(replica, is_ready).incarnation == 3


def test_a_start_that_ends_twice_by_the_same_mistake_is_not_repeated(make: Make) -> None:
    replica = make(program("raise ValueError('no implementation of this model')"))
    with pytest.raises(RecipeError, match="ended twice as it started: ValueError: no impl"):
        tick_for(replica, scaled(30))
    assert replica.build_view().incarnation == 2


class Stranger(JsonHandler):
    """Server that has taken the port, and answers every request with success."""

    asked = 0

    def get(self) -> None:
        Stranger.asked += 1
        self.answer(200, b"")


def test_another_process_on_its_port_is_not_the_server(make: Make, tmp_path: Path) -> None:
    binds = tmp_path / "binds"
    late = f"""
import pathlib, time
while not pathlib.Path({str(binds)!r}).exists(): time.sleep(0.01)
print("[Errno 98] ... address already in use", flush=True)
time.sleep(600)
"""
    with ExitStack() as strangers:

        def launch(incarnation: int, ports: ServerPorts) -> ServerCommand:
            if incarnation > 1:
                return server()(incarnation, ports)
            strangers.enter_context(serving_http(Stranger, ports.http))
            return program(late)(incarnation, ports)

        replica = make(launch, max_restarts=0)
        tick_until(replica, lambda _: Stranger.asked >= 3)
        assert replica.build_view().state == "starting"
        binds.touch()
        assert tick_until(replica, is_ready).incarnation == 2


def test_arguments_that_are_refused_are_the_users_to_mend(make: Make) -> None:
    replica = make(program("import sys; print('error: no --such flag'); sys.exit(2)"))
    with pytest.raises(RecipeError, match="no --such flag"):
        tick_until(replica, is_ready)


def test_a_server_never_ready_ends_the_cell_with_its_last_log(make: Make, tmp_path: Path) -> None:
    silent = "import time; print('loading', flush=True); time.sleep(600)"
    replica = make(program(silent), startup_timeout_s=1.0, max_restarts=1)
    tick_until(replica, lambda view: view.incarnation == 2)
    wait_for(lambda: "loading" in (tmp_path / "replica-0.2.log").read_text())
    with pytest.raises(ClusterError, match=r"not ready within 1 s, after 1 restarts[^$]*loading"):
        tick_until(replica, is_ready)
    assert replica.build_view().state == "failed"


def test_a_silent_server_is_replaced_but_not_within_an_update(make: Make) -> None:
    silent_s = scaled(60.0)
    replica = make(server(HEALTH_S=silent_s), health_timeout_s=scaled(0.6))
    tick_until(replica, is_ready)
    relay(replica, "pause_generation", scaled(30))
    tick_for(replica, scaled(1.2))
    assert replica.build_view().state == "ready"
    began = time.monotonic()
    replica.start_serving(ControlCallerIdentity(1, 1, 30), ReopenReplicaRequest("1.4"))
    tick_until(replica, lambda view: view.state == "starting")
    assert 0.5 <= time.monotonic() - began < silent_s


@pytest.mark.parametrize(
    ("routes", "answer"),
    [(["pause_generation", "begin_weight_update"], 200), (["pause_generation"], 500)],
    ids=["weights begun to change", "server does not go on"],
)
def test_a_vanished_sender_costs_a_restart(make: Make, routes: list[str], answer: int) -> None:
    replica = make(server(POST_STATUS=answer), max_restarts=0)
    tick_until(replica, is_ready)
    replica.start_serving(ControlCallerIdentity(1, 1, 30), ReopenReplicaRequest("1.4"))
    for route in routes:
        relay(replica, route, scaled(0.3))
    view = tick_until(replica, lambda view: view.incarnation == 2 and view.state == "ready")
    assert view.version == ""


def test_the_time_of_an_update_is_not_counted_from_one_whose_sender_vanished(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[float] = []
    monkeypatch.setattr(
        "areal_hpc.inference.replica.record_span",
        lambda name, begin, end, *_, **__: (
            updates.append(end - begin) if name == "weight update" else None
        ),
    )
    replica, caller = make(server()), ControlCallerIdentity(1, 1, 0.2)
    tick_until(replica, is_ready)
    replica.start_serving(caller, ReopenReplicaRequest("1.4"))
    replica.stop_serving(caller, FenceReplicaRequest())
    view = tick_until(replica, lambda view: view.version == "1.4")
    assert view.incarnation == 1, "its weights are whole"
    pause_s = scaled(0.5)
    time.sleep(pause_s)
    replica.stop_serving(caller, FenceReplicaRequest())
    replica.start_serving(caller, ReopenReplicaRequest("1.5"))
    assert [took_s < pause_s for took_s in updates] == [True]


def test_a_server_deaf_after_its_caller_left_is_replaced(make: Make, tmp_path: Path) -> None:
    deaf_s = scaled(60.0)
    replica = make(server(POST_S=deaf_s), max_restarts=0)
    tick_until(replica, is_ready)
    with control_proxy(replica, tmp_path) as proxy:
        began = time.monotonic()
        with pytest.raises(httpx.ReadTimeout):
            call(proxy, "replicas/0/init_weights_update_group", timeout_s=scaled(1.0))
        log = tmp_path / "replica-0.1.log"
        wait_for(lambda: "asked /init_weights_update_group" in log.read_text())
        tick_until(replica, lambda view: view.state == "starting")
        assert 3 < time.monotonic() - began < deaf_s


def test_weights_by_folder_are_unverified_at_first(make: Make, tmp_path: Path) -> None:
    (tmp_path / "weights" / "a" / "b").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    weights = tmp_path / "weights" / "1.3.0"
    weights.mkdir()
    log = tmp_path / "replica-0.1.log"
    replica = make(server())
    tick_until(replica, is_ready)
    with control_proxy(replica, tmp_path) as proxy:
        for name in ("../model", "/etc", ".", "..", "", "a/b", "not-there"):
            answer = call(proxy, "replicas/0/load", {"folder": name, "version": "1.1"})
            assert (answer.status_code, "no folder" in answer.text) == (400, True)
        assert "asked" not in log.read_text()
        call(proxy, "replicas/0/serve", {"version": "1.2"})
        call(proxy, "replicas/0/fence")
        call(proxy, "replicas/0/pause_generation", {"mode": "retract"})
        load = call(proxy, "replicas/0/load", {"folder": weights.name, "version": "1.3"})
        load.raise_for_status()
        # A thread writes the log: it may lag behind the answer.
        wait_for(lambda: "asked /update_weights_from_disk" in log.read_text())
        *_, line = [line for line in log.read_text().splitlines() if line.startswith("asked")]
        _, _, body = line.split(" ", 2)
        assert json.loads(body)["model_path"] == str(weights)
        assert json.loads(body)["weight_version"] == "1.3"
        call(proxy, "replicas/0/continue_generation")
        assert replica.build_view().version == "", "nobody has vouched for these weights"
        call(proxy, "replicas/0/serve", {"version": "1.3"})
    pause = replica.build_view().pause
    assert pause is not None
    assert pause.version == "1.3"
    assert 0 < pause.busy_s < pause.pause_s
    events = read_readable_records(tmp_path / "events.jsonl")
    (noted,) = [event for event in events if event["event"] == "replica_resumed"]
    assert (noted["pause_s"], noted["busy_s"]) == (pause.pause_s, pause.busy_s)


def test_the_next_start_removes_shared_memory_that_nobody_uses(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed server's files go; files in use, or of others, stay."""
    # In a folder of its own: replicas of tests beside this one remove such files, too.
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    monkeypatch.setattr(node_files, "SHARED_MEMORY_DIR", folder)
    names = ("sglang_loads_left", "sglang_loads_used", "sglang_loads_young", "of_somebody")
    paths = [folder / name for name in names]
    try:
        with paths[1].open("xb"):
            for path in paths:
                path.touch()
                if "young" not in path.name:
                    os.utime(path, (1.0, 1.0))
            make(server()).maintain_server_once()
            assert [path.exists() for path in paths] == [False, True, True, True]
    finally:
        shutil.rmtree(folder)


PATIENCE_S = scaled(1.0)
PART = "import sys, time; time.sleep(600)"


class Pair:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[tuple[int, NodeOptions]] = []
        self.head = make_replica(folder, server(), nodes=2)
        self._stack = ExitStack()
        self.proxy = self._stack.enter_context(control_proxy(self.head, folder))
        rendezvous.publish_endpoint(folder, "control-cell-0", self.proxy.url)
        self.worker = WorkerNode(
            1,
            2,
            launch=self._launch,
            cell="cell-0",
            rendezvous_dir=folder,
            service_key=KEY,
            log_dir=folder,
            head_timeout_s=PATIENCE_S,
        )

    def _launch(self, incarnation: int, ports: ServerPorts, part: NodeOptions) -> ServerCommand:
        self.parts.append((incarnation, part))
        return server_command(PART, ports)

    def tick_until(self, condition: Callable[[], bool]) -> None:
        def tick() -> bool:
            self.head.maintain_server_once()
            self.worker.sync_with_head_node()
            return condition()

        wait_for(tick, why=lambda: (self.head.build_view(), self.parts))

    def is_ready(self, incarnation: int) -> bool:
        view = self.head.build_view()
        return (view.incarnation, view.state) == (incarnation, "ready")

    def running(self) -> list[psutil.Process]:
        children = psutil.Process().children(recursive=True)
        return [part for part in children if command_of(part)[2:] and PART in command_of(part)[2]]

    def close(self) -> None:
        self.worker.stop_part_for_good()
        self.head.request_stop()
        self.head.kill()
        self._stack.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_both_nodes_run_the_same_incarnation_until_either_loses_its_part(pair: Pair) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    ((incarnation, part),) = pair.parts
    assert (incarnation, part.node, part.nodes) == (1, 1, 2)
    assert part.meeting_point.startswith("127.0.0.1:")
    assert (pair.folder / "replica-0.1-node-1.log").exists()
    pair.running()[0].kill()
    pair.tick_until(lambda: pair.is_ready(2) and len(pair.running()) == 1)
    assert len(pair.parts) == 2
    assert "lost its process on node 1" in (pair.folder / "events.jsonl").read_text()
    (old,) = pair.running()
    psutil.Process(pair.head._server.pid).kill()  # type: ignore[union-attr]
    pair.tick_until(
        lambda: pair.is_ready(3) and len(pair.running()) == 1 and old not in pair.running()
    )
    assert [incarnation for incarnation, _ in pair.parts] == [1, 2, 3]


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_part_does_not_outlive_a_first_node_that_is_gone_or_silent(
    pair: Pair, is_silent: bool
) -> None:
    pair.tick_until(lambda: pair.is_ready(1) and len(pair.running()) == 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if is_silent:
            rendezvous.publish_endpoint(pair.folder, "control-cell-0", url)
        else:
            pair.proxy.stop()

        def is_over() -> bool:
            pair.worker.sync_with_head_node()
            return not pair.running()

        wait_for(is_over)


def test_a_node_that_the_cell_does_not_have_is_refused(pair: Pair) -> None:
    for node in (0, 2, -1):
        answer = call(pair.proxy, "follow", {"node": node, "incarnation": 0})
        expected = f"expected a node from 1 to 1, got {node}"
        assert (answer.status_code, expected in answer.text) == (400, True)

"""The life of a replica, with small HTTP servers in the place of SGLang."""

import http.client
import http.server
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from areal_hpc.errors import ClusterError, ControlCallError, RecipeError
from areal_hpc.inference.command import ServerCommand, ServerPorts
from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.multi_node import MultiNodeReplica
from areal_hpc.inference.replica import BuildCommand, ControlCaller, Replica
from areal_hpc.jobs.restart_policy import RestartPolicy
from areal_hpc.rundir.events import EventLog
from areal_hpc.wire.replicas import FenceRequest, ReplicaView, ServeRequest
from tests.support.process_commands import is_scheduler

SERVER = """
import http.server, subprocess, sys, time
subprocess.Popen(
    ["sglang::scheduler", "-c", "import time; time.sleep(60)"], executable=sys.executable
)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(BYSTANDER_S)"])
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health_generate": time.sleep(HEALTH_S)
        self.send_response(200); self.end_headers()
    def do_POST(self):
        print("asked for", self.path, flush=True)
        time.sleep(POST_S)
        self.send_response(CONTINUE); self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""
FACTS = {"BYSTANDER_S": 60.0, "HEALTH_S": 0.0, "POST_S": 0.0, "CONTINUE": 200}

PATIENCE_S = 60.0
"""What does not happen in such a time never will."""

Make = Callable[..., Replica]


def server(before: str = "", **facts: float) -> BuildCommand:
    """One that answers like SGLang where the keeper looks, and does something `before`."""
    text = before + SERVER
    for name, value in (FACTS | facts).items():
        text = text.replace(name, str(value))
    return program(text)


def program(text: str) -> BuildCommand:
    return lambda incarnation, ports: ServerCommand((sys.executable, "-c", text, str(ports.http)))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Replica] = []

    def make(
        launch: BuildCommand, max_restarts: int = 3, healthy_s: float = 600, **options: float
    ) -> Replica:
        replica = Replica(
            0,
            tp=1,
            span=MultiNodeReplica(1),
            launch=launch,
            log_dir=tmp_path,
            events=EventLog(tmp_path / "events.jsonl", "cell-0"),
            policy=RestartPolicy(max_restarts, healthy_s=healthy_s),
            **{"startup_timeout_s": 60, "health_timeout_s": 60, **options},
        )
        made.append(replica)
        return replica

    yield make
    for replica in made:
        replica.request_stop()
        replica.kill()


def tick_until(replica: Replica, wanted: Callable[[ReplicaView], bool]) -> ReplicaView:
    give_up_at = time.monotonic() + PATIENCE_S
    while not wanted(replica.view()):
        assert time.monotonic() < give_up_at, replica.view()
        replica.tick()
        time.sleep(0.01)
    return replica.view()


def is_ready(view: ReplicaView) -> bool:
    return view.state == "ready"


def schedulers() -> list[psutil.Process]:
    return [*filter(is_scheduler, psutil.Process().children(True))]


def caller(replica: Replica, *, generation: int = 1, deadline_s: float = 30) -> ControlCaller:
    return ControlCaller(replica.view().incarnation, generation, deadline_s)


def relay(replica: Replica, route: str, deadline_s: float) -> None:
    """What the relay says of a call that SGLang accepted."""
    replica.called(caller(replica, deadline_s=deadline_s), route)
    replica.answered(caller(replica, deadline_s=deadline_s), route, accepted=True)


def tick_for(replica: Replica, seconds: float) -> None:
    stop_at = time.monotonic() + seconds
    while time.monotonic() < stop_at:
        replica.tick()
        time.sleep(0.01)
    replica.tick()


def await_said(log: Path, words: str) -> None:
    """Wait for what a server says, without a tick."""
    give_up_at = time.monotonic() + PATIENCE_S
    while words not in log.read_text():
        assert time.monotonic() < give_up_at, log.read_text()
        time.sleep(0.01)


def test_a_lost_child_process_replaces_the_server(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    (child,) = schedulers()
    child.kill()
    view = tick_until(replica, lambda view: view.incarnation == 2 and view.state == "ready")
    assert view.version == ""


def test_what_a_server_leaves_in_temporary_folders_goes_with_it(make: Make, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    litter = f"""
import pathlib, tempfile
with open({str(notes)!r}, "a") as notes:
    print(tempfile.NamedTemporaryFile(delete=False).name, file=notes)
"""
    replica = make(server(litter))
    tick_until(replica, is_ready)
    left = Path(notes.read_text().strip())
    assert left.exists()
    replica.request_stop()
    replica.kill()
    assert not left.parent.exists()


@pytest.mark.parametrize("then", ["raise SystemExit(3)", "import time; time.sleep(600)"])
def test_a_taken_port_is_no_crash(make: Make, then: str) -> None:
    taken = f"print('[Errno 98] ... address already in use', flush=True); {then}"

    def launch(incarnation: int, ports: ServerPorts) -> ServerCommand:
        return (program(taken) if incarnation < 3 else server())(incarnation, ports)

    replica = make(launch, max_restarts=0)
    assert tick_until(replica, is_ready).incarnation == 3


class Stranger(http.server.BaseHTTPRequestHandler):
    """Has taken the port, and says yes to all."""

    asked = 0

    def do_GET(self) -> None:
        Stranger.asked += 1
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_another_process_that_answers_on_its_port_is_not_taken_for_the_server(
    make: Make, tmp_path: Path
) -> None:
    binds = tmp_path / "binds"
    late = f"""
import pathlib, time
while not pathlib.Path({str(binds)!r}).exists(): time.sleep(0.01)
print("[Errno 98] ... address already in use", flush=True)
time.sleep(600)
"""
    strangers: list[http.server.ThreadingHTTPServer] = []

    def launch(incarnation: int, ports: ServerPorts) -> ServerCommand:
        if incarnation > 1:
            return server()(incarnation, ports)
        strangers.append(http.server.ThreadingHTTPServer(("127.0.0.1", ports.http), Stranger))
        threading.Thread(target=strangers[0].serve_forever, daemon=True).start()
        return program(late)(incarnation, ports)

    replica = make(launch, max_restarts=0)
    tick_until(replica, lambda _: Stranger.asked >= 3)
    assert replica.view().state == "starting"
    binds.touch()
    assert tick_until(replica, is_ready).incarnation == 2
    strangers[0].shutdown()
    strangers[0].server_close()


def test_arguments_that_are_refused_are_the_users_to_mend(make: Make) -> None:
    replica = make(program("import sys; print('error: no --such flag'); sys.exit(2)"))
    with pytest.raises(RecipeError, match="no --such flag"):
        tick_until(replica, is_ready)


def test_a_server_that_never_gets_ready_ends_the_cell_with_its_last_words(
    make: Make, tmp_path: Path
) -> None:
    silent = "import time; print('loading', flush=True); time.sleep(600)"
    replica = make(program(silent), startup_timeout_s=1.0, max_restarts=1)
    tick_until(replica, lambda view: view.incarnation == 2)
    await_said(tmp_path / "replica-0.2.log", "loading")
    with pytest.raises(ClusterError, match=r"not ready within 1 s, after 1 restarts[^$]*loading"):
        tick_until(replica, is_ready)
    assert replica.view().state == "failed"


def test_incarnations_go_on_counting_in_the_next_job(make: Make) -> None:
    first = make(server())
    tick_until(first, is_ready)
    second = make(server())
    assert tick_until(second, is_ready).incarnation == 2


def test_a_child_that_comes_and_goes_is_no_loss(make: Make) -> None:
    replica = make(server(BYSTANDER_S=0.3))
    tick_until(replica, is_ready)
    tick_for(replica, 0.6)
    assert replica.view().incarnation == 1


def test_a_silent_server_is_replaced(make: Make) -> None:
    replica = make(server(HEALTH_S=60.0), health_timeout_s=1.0)
    began = 0.0
    while replica.view().state != "ready":
        began = time.monotonic()
        replica.tick()
        time.sleep(0.01)
    tick_until(replica, lambda view: view.state == "starting")
    assert 1.0 <= time.monotonic() - began < 10


def test_silence_in_an_update_is_no_death(make: Make) -> None:
    replica = make(server(HEALTH_S=60.0), health_timeout_s=0.6)
    tick_until(replica, is_ready)
    relay(replica, "pause_generation", 30)
    tick_for(replica, 1.2)
    assert replica.view().state == "ready"


def test_old_crashes_are_forgiven(make: Make) -> None:
    replica = make(server(), max_restarts=1, healthy_s=0.3)
    for incarnation in (1, 2, 3):
        tick_until(replica, lambda view: view.state == "ready")
        assert replica.view().incarnation == incarnation
        tick_for(replica, 0.6)
        schedulers()[0].kill()
        tick_until(replica, lambda view: view.state == "starting")


def test_a_fenced_replica_serves_only_when_told_to(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    assert replica.serve(caller(replica), ServeRequest("1.4")).state == "serving"
    assert replica.fence(caller(replica), FenceRequest()).version == ""
    assert replica.view().state == "ready"
    assert replica.serve(caller(replica), ServeRequest("1.5")).version == "1.5"


def test_an_older_generation_can_neither_fence_nor_serve_nor_call(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    replica.serve(caller(replica, generation=2), ServeRequest("2.0"))
    old = caller(replica, generation=1)
    with pytest.raises(ControlCallError, match="generation 2"):
        replica.fence(old, FenceRequest())
    with pytest.raises(ControlCallError, match="generation 2"):
        replica.serve(old, ServeRequest("1.9"))
    with pytest.raises(ControlCallError, match="generation 2"):
        replica.called(old, "begin_weight_update")
    assert replica.view().version == "2.0"


def test_a_sender_that_vanishes_before_any_change_leaves_the_old_weights_in_service(
    make: Make, tmp_path: Path
) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    replica.serve(caller(replica), ServeRequest("1.4"))
    replica.fence(caller(replica, deadline_s=0.3), FenceRequest())
    relay(replica, "pause_generation", 0.3)
    view = tick_until(replica, lambda view: view.state == "serving")
    assert (view.incarnation, view.version) == (1, "1.4")
    assert "asked for /continue_generation" in (tmp_path / "replica-0.1.log").read_text()


def test_a_replica_that_its_sender_gave_up_stays_out_of_service(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    replica.serve(caller(replica), ServeRequest("1.4"))
    replica.fence(caller(replica, deadline_s=0.2), FenceRequest())
    replica.fence(caller(replica, deadline_s=0.2), FenceRequest(stays=True))
    tick_for(replica, 0.6)
    assert (replica.view().incarnation, replica.view().state) == (1, "ready")


@pytest.mark.parametrize(
    ("routes", "answer"),
    [(["pause_generation", "begin_weight_update"], 200), (["pause_generation"], 500)],
    ids=["weights begun to change", "server does not go on"],
)
def test_a_vanished_sender_costs_a_restart(make: Make, routes: list[str], answer: int) -> None:
    replica = make(server(CONTINUE=answer), max_restarts=0)
    tick_until(replica, is_ready)
    replica.serve(caller(replica), ServeRequest("1.4"))
    for route in routes:
        relay(replica, route, 0.3)
    view = tick_until(replica, lambda view: view.incarnation == 2 and view.state == "ready")
    assert view.version == ""


def test_fencing_and_pausing_again_do_not_put_off_the_end(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    began = time.monotonic()
    relay(replica, "begin_weight_update", 0.4)
    while replica.view().state == "ready" and time.monotonic() - began < 20:
        replica.fence(caller(replica, deadline_s=0.4), FenceRequest())
        relay(replica, "pause_generation", 0.4)
        replica.tick()
        time.sleep(0.02)
    assert 0.4 <= time.monotonic() - began < 10


def test_accepted_calls_put_off_the_end_and_serving_cancels_it(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    relay(replica, "pause_generation", 0.3)
    relay(replica, "begin_weight_update", 0.3)
    relay(replica, "update_weights_from_distributed", 60)
    tick_for(replica, 0.5)
    assert replica.view().incarnation == 1
    relay(replica, "update_weights_from_distributed", 0.3)
    relay(replica, "continue_generation", 0.3)
    replica.serve(caller(replica), ServeRequest("1.4"))
    tick_for(replica, 0.4)
    assert (replica.view().incarnation, replica.view().version) == (1, "1.4")


def test_a_call_under_way_is_waited_for_before_its_sender_has_vanished(make: Make) -> None:
    replica = make(server())
    tick_until(replica, is_ready)
    replica.called(caller(replica, deadline_s=0.2), "begin_weight_update")
    tick_for(replica, 0.5)
    assert replica.view().incarnation == 1
    replica.answered(caller(replica, deadline_s=0.2), "begin_weight_update", accepted=False)
    tick_until(replica, lambda view: view.state == "starting")


def test_a_server_that_is_deaf_for_the_sake_of_a_caller_who_left_is_replaced(
    make: Make, tmp_path: Path
) -> None:
    replica = make(server(POST_S=60.0), max_restarts=0)
    tick_until(replica, is_ready)
    app = ControlProxyApp("cell-0", [replica], "key", tmp_path)
    relay_server = ControlProxyServer(app, "127.0.0.1")
    relay_server.start()
    headers = {
        "authorization": "Bearer key",
        "x-areal-incarnation": "1",
        "x-areal-generation": "1",
        "x-areal-deadline-s": "100",
    }
    leaver = http.client.HTTPConnection(urlsplit(relay_server.url).netloc, timeout=PATIENCE_S)
    leaver.request("POST", "/replicas/0/init_weights_update_group", b"{}", headers)
    await_said(tmp_path / "replica-0.1.log", "asked for /init_weights_update_group")
    began = time.monotonic()
    leaver.close()
    tick_until(replica, lambda view: view.state == "starting")
    assert 3 < time.monotonic() - began < 30
    relay_server.stop()

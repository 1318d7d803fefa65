"""The life of a replica, with small HTTP servers in the place of SGLang."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.inference.command import Command, Ports
from areal_hpc.inference.replica import Launch, Replica
from areal_hpc.telemetry import EventLog
from areal_hpc.wire.replicas import ReplicaView

SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""

Make = Callable[..., Replica]


def program(text: str) -> Launch:
    return lambda incarnation, ports: Command((sys.executable, "-c", text, str(ports.http)))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Replica] = []

    def make(launch: Launch, *, startup_timeout_s: float = 20, max_restarts: int = 3) -> Replica:
        replica = Replica(
            0,
            tp=1,
            launch=launch,
            log_dir=tmp_path,
            events=EventLog(tmp_path / "events.jsonl", "cell-0"),
            startup_timeout_s=startup_timeout_s,
            max_restarts=max_restarts,
        )
        made.append(replica)
        return replica

    yield make
    for replica in made:
        replica.request_stop()
        replica.kill()


def tick_until(replica: Replica, wanted: Callable[[ReplicaView], bool]) -> ReplicaView:
    give_up_at = time.monotonic() + 30
    while not wanted(replica.view()):
        assert time.monotonic() < give_up_at, replica.view()
        replica.tick()
        time.sleep(0.01)
    return replica.view()


def is_ready(view: ReplicaView) -> bool:
    return view.state == "ready"


def grandchildren() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children(True)
        if child.cmdline()[-1] == "import time; time.sleep(60)"
    ]


def test_a_lost_child_process_replaces_the_server(make: Make) -> None:
    replica = make(program(SERVER))
    tick_until(replica, is_ready)
    (child,) = grandchildren()
    child.kill()
    view = tick_until(replica, lambda view: view.incarnation == 2 and view.state == "ready")
    assert view.version == ""


def test_a_taken_port_is_no_crash(make: Make) -> None:
    def launch(incarnation: int, ports: Ports) -> Command:
        taken = "raise SystemExit('[Errno 98] ... address already in use')"
        return program(taken if incarnation < 3 else SERVER)(incarnation, ports)

    replica = make(launch, max_restarts=0)
    assert tick_until(replica, is_ready).incarnation == 3


def test_arguments_that_are_refused_are_the_users_to_mend(make: Make) -> None:
    replica = make(program("import sys; print('error: no --such flag'); sys.exit(2)"))
    with pytest.raises(RecipeError, match="no --such flag"):
        tick_until(replica, is_ready)


def test_a_server_that_never_gets_ready_ends_the_cell_with_its_last_words(make: Make) -> None:
    silent = "import time; print('loading', flush=True); time.sleep(60)"
    replica = make(program(silent), startup_timeout_s=0.5, max_restarts=1)
    with pytest.raises(ClusterError, match=r"not ready within 0 s, after 1 restarts[^$]*loading"):
        tick_until(replica, is_ready)
    assert replica.view().state == "failed"


def test_incarnations_go_on_counting_in_the_next_job(make: Make) -> None:
    first = make(program(SERVER))
    tick_until(first, is_ready)
    second = make(program(SERVER))
    assert tick_until(second, is_ready).incarnation == 2


def test_pausing_again_does_not_put_off_the_restart(make: Make) -> None:
    replica = make(program(SERVER))
    tick_until(replica, is_ready)
    paused_at = time.monotonic()
    while replica.view().incarnation == 1 and time.monotonic() - paused_at < 5:
        replica.note_relayed("pause_generation", 1, 0.4)
        replica.tick()
        time.sleep(0.02)
        if replica.view().state == "starting":
            break
    assert 0.4 <= time.monotonic() - paused_at < 2


def test_accepted_calls_put_off_the_restart_and_continuing_cancels_it(make: Make) -> None:
    replica = make(program(SERVER))
    tick_until(replica, is_ready)
    replica.note_relayed("pause_generation", 1, 0.3)
    for _ in range(4):
        time.sleep(0.15)
        replica.note_relayed("update_weights_from_distributed", 1, 0.3)
        replica.tick()
    replica.note_relayed("continue_generation", 1, 0.3)
    time.sleep(0.4)
    replica.tick()
    assert replica.view().state == "ready"
    assert replica.view().incarnation == 1

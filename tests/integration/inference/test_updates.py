"""What the cell itself does for an update: weights by folder, and the stall that it saw."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from areal_hpc.inference.command import ServerCommand, ServerPorts
from areal_hpc.inference.control_proxy import ControlProxyApp, ControlProxyServer
from areal_hpc.inference.multi_node import MultiNodeReplica
from areal_hpc.inference.replica import Replica
from areal_hpc.jobs.restart_policy import RestartPolicy
from areal_hpc.rundir.events import EventLog
from areal_hpc.rundir.jsonl import read_lines

SILENT_S = 0.4
"""What the scripted server takes from the order to go on until its first batch."""
SGLANG = f"""
import http.server, json, sys, time
go_on_at = 0.0
class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_GET(self):
        running = dict(num_running_reqs=2, num_waiting_reqs=1, num_used_tokens=300)
        published_at = go_on_at + {SILENT_S} if 0 < go_on_at < time.time() - {SILENT_S} else 1.0
        self.answer(dict(loads=[dict(timestamp=published_at, **running)]))
    def do_POST(self):
        global go_on_at
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        print("asked", self.path, body, flush=True)
        if self.path == "/continue_generation": go_on_at = time.time()
        self.answer({{}})
    def answer(self, body):
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""


class Stage:
    """A replica that is up, and its relay."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.replica = Replica(
            0,
            tp=1,
            span=MultiNodeReplica(1),
            launch=self._launch,
            log_dir=directory,
            events=EventLog(directory / "events.jsonl", "cell-0"),
            startup_timeout_s=60,
            health_timeout_s=60,
            policy=RestartPolicy(0),
        )
        app = ControlProxyApp("cell-0", [self.replica], "key", directory / "weights")
        self.relay = ControlProxyServer(app, "127.0.0.1")
        self.relay.start()

    @staticmethod
    def _launch(incarnation: int, ports: ServerPorts) -> ServerCommand:
        return ServerCommand((sys.executable, "-c", SGLANG, str(ports.http)))

    def call(self, route: str, body: object = None, generation: int = 1) -> httpx.Response:
        headers = {
            "authorization": "Bearer key",
            "x-areal-incarnation": "1",
            "x-areal-generation": str(generation),
        }
        url = f"{self.relay.url}/replicas/0/{route}"
        return httpx.post(url, json=body or {}, headers=headers, timeout=60, trust_env=False)

    def asked(self) -> list[str]:
        text = (self.directory / "replica-0.1.log").read_text()
        return [line for line in text.splitlines() if line.startswith("asked")]


@contextmanager
def running(directory: Path) -> Iterator[Stage]:
    stage = Stage(directory)
    try:
        give_up_at = time.monotonic() + 60
        while stage.replica.view().state != "ready":
            assert time.monotonic() < give_up_at
            stage.replica.tick()
            time.sleep(0.02)
        yield stage
    finally:
        stage.replica.kill()
        stage.relay.stop()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running(tmp_path_factory.mktemp("cell")) as stage:
        yield stage


@pytest.mark.parametrize("folder", ["../model", "/etc", ".", "..", "", "a/b", "not-there"])
def test_no_path_but_a_folder_of_the_run_is_loaded(stage: Stage, folder: str) -> None:
    (stage.directory / "weights" / "a" / "b").mkdir(parents=True, exist_ok=True)
    (stage.directory / "model").mkdir(exist_ok=True)
    answer = stage.call("load", {"folder": folder, "version": "1.1"})
    assert answer.status_code == 400
    assert "no folder" in answer.text
    assert not any("disk" in line for line in stage.asked())


def test_sglangs_own_route_for_files_is_not_reachable(stage: Stage) -> None:
    assert stage.call("update_weights_from_disk", {"model_path": "/etc"}).status_code == 404


def test_an_update_from_disk_is_a_change_of_weights_until_it_is_verified(tmp_path: Path) -> None:
    (tmp_path / "weights" / "1.3.0").mkdir(parents=True)
    with running(tmp_path) as stage:
        stage.call("serve", {"version": "1.2"})
        stage.call("fence", {})
        stage.call("pause_generation", {"mode": "retract"})
        stage.call("load", {"folder": "1.3.0", "version": "1.3"}).raise_for_status()
        path, body = stage.asked()[-1].split(" ", 2)[1:]
        assert path == "/update_weights_from_disk"
        assert json.loads(body)["model_path"] == str(tmp_path / "weights" / "1.3.0")
        assert json.loads(body)["weight_version"] == "1.3"
        stage.call("continue_generation")
        assert stage.replica.view().version == "", "nobody has vouched for these weights"
        stage.call("serve", {"version": "1.3"})
        give_up_at = time.monotonic() + 60
        while (stall := stage.replica.view().stall) is None:
            assert time.monotonic() < give_up_at
            time.sleep(0.02)
    assert (stall.version, stall.requests, stall.recomputed_tokens) == ("1.3", 3, 300)
    assert SILENT_S <= stall.reprefill_s < stall.stall_s
    noted = [
        event
        for event in read_lines(tmp_path / "events.jsonl")
        if event["event"] == "replica_resumed"
    ]
    assert [event["reprefill_s"] for event in noted] == [stall.reprefill_s]

"""What the cell itself does for an update: weights by folder, and the pause that it saw."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.inference.control_proxy import ControlProxyServer
from areal_hpc.inference.replica import Replica
from areal_hpc.rundir.jsonl import read_lines
from tests.integration.inference.small_servers import (
    SILENT_S,
    call,
    control_proxy,
    is_ready,
    make_replica,
    server,
    tick_until,
)
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cell")


@pytest.fixture(scope="module")
def replica(folder: Path) -> Iterator[Replica]:
    replica = make_replica(folder, server())
    tick_until(replica, is_ready)
    yield replica
    replica.kill()


@pytest.fixture(scope="module")
def proxy(replica: Replica, folder: Path) -> Iterator[ControlProxyServer]:
    with control_proxy(replica, folder) as proxy:
        yield proxy


def asked(folder: Path) -> list[str]:
    lines = (folder / "replica-0.1.log").read_text().splitlines()
    return [line for line in lines if line.startswith("asked")]


def test_no_path_but_a_folder_of_the_run_is_loaded(proxy: ControlProxyServer, folder: Path) -> None:
    (folder / "weights" / "a" / "b").mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    before = asked(folder)
    for name in ("../model", "/etc", ".", "..", "", "a/b", "not-there"):
        answer = call(proxy, "replicas/0/load", {"folder": name, "version": "1.1"})
        assert answer.status_code == 400
        assert "no folder" in answer.text
    assert asked(folder) == before


def test_an_update_from_disk_is_a_change_of_weights_until_it_is_verified(
    proxy: ControlProxyServer, replica: Replica, folder: Path
) -> None:
    weights = folder / "weights" / "1.3.0"
    weights.mkdir(parents=True)
    call(proxy, "replicas/0/serve", {"version": "1.2"})
    call(proxy, "replicas/0/fence")
    call(proxy, "replicas/0/pause_generation", {"mode": "retract"})
    load = call(proxy, "replicas/0/load", {"folder": weights.name, "version": "1.3"})
    load.raise_for_status()
    path, body = asked(folder)[-1].split(" ", 2)[1:]
    assert path == "/update_weights_from_disk"
    assert json.loads(body)["model_path"] == str(weights)
    assert json.loads(body)["weight_version"] == "1.3"
    call(proxy, "replicas/0/continue_generation")
    assert replica.view().version == "", "nobody has vouched for these weights"
    call(proxy, "replicas/0/serve", {"version": "1.3"})
    wait_for(lambda: replica.view().stall)
    pause = replica.view().stall
    assert pause is not None
    assert (pause.version, pause.requests, pause.recomputed_tokens) == ("1.3", 3, 300)
    assert SILENT_S <= pause.reprefill_s < pause.stall_s
    events = read_lines(folder / "events.jsonl")
    (noted,) = [event for event in events if event["event"] == "replica_resumed"]
    assert noted["reprefill_s"] == pause.reprefill_s

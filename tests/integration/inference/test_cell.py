import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.inference_cell import Cell, alive, running_cell, tiny_qwen3
from tests.support.process_commands import is_scheduler

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    run_dir = tmp_path_factory.mktemp("run")
    with running_cell(run_dir, tiny_qwen3(0), health_timeout_s=8) as cell:
        cell.await_replica(lambda view: view.state == "ready")
        yield cell


def test_only_the_admin_key_opens_the_relay(cell: Cell) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert httpx.get(f"{cell.relay.base_url}/replicas", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "route", ["generate", "update_weights_from_tensor", "update_weights_from_disk", "health", ""]
)
def test_a_route_that_is_not_listed_does_not_exist(cell: Cell, route: str) -> None:
    assert cell.control(route).status_code == 404


def test_the_server_itself_listens_on_loopback_only(cell: Cell) -> None:
    listening = {
        connection.laddr.ip
        for process in cell.engine_processes()
        for connection in process.net_connections(kind="tcp")
        if connection.status == "LISTEN" and connection.laddr.port == int(cell.replica().url[-5:])
    }
    assert listening == {"127.0.0.1"}


def test_a_call_meant_for_another_incarnation_or_an_old_generation_is_refused(cell: Cell) -> None:
    assert cell.control("model_info", incarnation="7").status_code == 409
    cell.generation += 1
    assert cell.control("model_info").json()["weight_version"] == "unset"
    refused = cell.control("model_info", generation=str(cell.generation - 1))
    assert refused.status_code == 409
    assert f"generation {cell.generation}" in refused.json()["error"]


def test_serving_and_fencing_obey_the_generation_and_the_incarnation(cell: Cell) -> None:
    cell.generation += 1
    assert cell.control("serve", {"version": f"{cell.generation}.0"}).json()["state"] == "serving"
    for route, body in (("serve", {"version": "0.9"}), ("fence", {})):
        assert cell.control(route, body, generation=str(cell.generation - 1)).status_code == 409
        assert cell.control(route, body, incarnation="7").status_code == 409
    assert cell.replica().version == f"{cell.generation}.0"
    fenced = cell.control("fence", {}, deadline_s="0.5")
    assert (fenced.json()["state"], fenced.json()["version"]) == ("ready", "")
    cell.await_replica(lambda view: view.version == f"{cell.generation}.0")


def test_a_pause_whose_sender_vanished_ends_with_the_weights_it_found(cell: Cell) -> None:
    before = cell.await_replica(lambda view: view.state in ("ready", "serving"))
    cell.control("serve", {"version": f"{cell.generation}.1"})
    cell.control("fence", {}, deadline_s="1.0")
    paused = cell.control("pause_generation", {"mode": "retract"}, deadline_s="1.0")
    assert paused.status_code == 200
    after = cell.await_replica(lambda view: view.state == "serving")
    assert (after.incarnation, after.version) == (before.incarnation, f"{cell.generation}.1")
    assert cell.generate([5, 6, 7], max_new_tokens=4, temperature=0)["output_ids"]


def test_a_change_of_weights_whose_sender_vanished_ends_in_a_restart(cell: Cell) -> None:
    before = cell.await_replica(lambda view: view.state in ("ready", "serving"))
    cell.control("serve", {"version": f"{cell.generation}.2"})
    began = time.monotonic()
    for route in ("pause_generation", "begin_weight_update"):
        body = {"mode": "retract"} if route == "pause_generation" else {}
        assert cell.control(route, body, deadline_s="1.0").status_code == 200
    assert cell.replica().state != "serving"
    after = cell.await_replica(lambda view: view.incarnation > before.incarnation)
    assert time.monotonic() - began >= 1.0
    after = cell.await_replica(lambda view: view.state != "starting")
    assert (after.incarnation, after.state, after.version) == (before.incarnation + 1, "ready", "")
    died = [event for event in cell.events() if event["event"] == "replica_died"]
    assert "sender disappeared" in died[-1]["reason"]
    reply = cell.generate([5, 6, 7], max_new_tokens=4, temperature=0)
    assert len(reply["output_ids"]) <= 4


def test_a_server_whose_scheduler_hangs_is_replaced(cell: Cell) -> None:
    before = cell.await_replica(lambda view: view.state in ("ready", "serving"))
    (scheduler,) = filter(is_scheduler, cell.engine_processes())
    scheduler.suspend()
    cell.await_replica(lambda view: view.incarnation > before.incarnation)
    cell.await_replica(lambda view: view.state == "ready")
    died = [event for event in cell.events() if event["event"] == "replica_died"]
    assert "was unresponsive for 8 s" in died[-1]["reason"]


def test_stopping_a_cell_whose_server_starts_takes_seconds(tmp_path: Path) -> None:
    """0.4 to 0.7 s on an idle machine; SGLang left to itself goes on for as long as it starts."""
    with running_cell(tmp_path, tiny_qwen3(0)) as starting:
        engine = engine_with_children(starting)
        starting.job.send_signal(signal.SIGTERM)
        assert starting.job.wait(15) == 0
    assert alive(engine) == []


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_a_killed_job_leaves_no_process_behind(tmp_path: Path, moment: str) -> None:
    with running_cell(tmp_path, tiny_qwen3(0)) as cell:
        engine = engine_with_children(cell)
        if moment == "ready":
            cell.await_replica(lambda view: view.state == "ready")
            engine = cell.engine_processes()
        cell.job.send_signal(signal.SIGKILL)
        await_end(engine)


def engine_with_children(cell: Cell) -> list[psutil.Process]:
    """The server once it has forked its scheduler and detokenizer."""
    give_up_at = time.monotonic() + 60
    while len(engine := cell.engine_processes()) < 3:
        assert time.monotonic() < give_up_at, cell.logs()
        time.sleep(0.05)
    return engine


def await_end(processes: list[psutil.Process]) -> None:
    give_up_at = time.monotonic() + 60
    while alive(processes) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    assert alive(processes) == []

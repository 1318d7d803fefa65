import asyncio
import gzip
import signal
from collections.abc import Iterator

import httpx
import pytest

from areal_hpc.jobs.processes.stack_dumps import request_stacks
from areal_hpc.rollout.concurrency import EngineLoad, EngineLoadReader
from areal_hpc.rundir.rendezvous import derive_bearer_key, make_client_tls
from areal_hpc.wire.replicas import ReplicaView
from tests.support.deadlines import scaled
from tests.support.inference_cell import Cell, running_cell, tiny_qwen3
from tests.support.process_commands import alive
from tests.support.run_files import events_of
from tests.support.service_keys import OTHER_SERVICE_KEY
from tests.support.waiting import wait_for

HEALTH_TIMEOUT_S = scaled(8)
TRACED_STEP = 41


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    run_dir = tmp_path_factory.mktemp("run")
    trainer = {"profile": {"steps": [TRACED_STEP], "server_seconds": 1.0}}
    with running_cell(
        run_dir, tiny_qwen3(0), trainer=trainer, health_timeout_s=HEALTH_TIMEOUT_S
    ) as cell:
        yield cell


@pytest.fixture
def before(cell: Cell) -> ReplicaView:
    """Return the view of the cell's replica, once it runs."""
    return cell.await_replica(lambda view: view.state in ("ready", "serving"))


def test_the_relay_is_opened_by_its_own_key_over_tls_alone(cell: Cell) -> None:
    url, tls = f"{cell.relay.base_url}/replicas", make_client_tls(cell.service_key)
    own_key = derive_bearer_key(cell.service_key, f"control-{cell.name}")
    for key in ("", "wrong", derive_bearer_key(cell.service_key, "ledger"), f"{own_key}0"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        refused = httpx.get(url, headers=headers, verify=tls)
        assert refused.status_code == 401
        assert own_key not in refused.text
    headers = {"Authorization": f"Bearer {own_key}"}
    assert httpx.get(url, headers=headers, verify=tls).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url, headers=headers, verify=make_client_tls(OTHER_SERVICE_KEY))
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https:", "http:"), headers=headers)


def test_a_route_that_is_not_listed_does_not_exist(cell: Cell) -> None:
    for route in ("generate", "update_weights_from_tensor", "update_weights_from_disk", "health"):
        assert cell.control(route).status_code == 404
    assert cell.control("").status_code == 404


@pytest.mark.thorough
@pytest.mark.usefixtures("before")
def test_the_server_itself_listens_on_loopback_only(cell: Cell) -> None:
    listening = {
        connection.laddr.ip
        for process in cell.engine_processes()
        for connection in process.net_connections(kind="tcp")
        if connection.status == "LISTEN" and connection.laddr.port == int(cell.replica().url[-5:])
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.usefixtures("before")
def test_calls_obey_the_generation_and_the_incarnation(cell: Cell) -> None:
    cell.generation += 1
    assert cell.control("model_info").json()["weight_version"] == "unset"
    assert cell.control("serve", {"version": f"{cell.generation}.0"}).json()["state"] == "serving"
    for route, body in (("model_info", {}), ("serve", {"version": "0.9"}), ("fence", {})):
        old = cell.control(route, body, generation=str(cell.generation - 1))
        assert old.status_code == 409
        assert f"generation {cell.generation}" in old.json()["error"]
        assert cell.control(route, body, incarnation="7777").status_code == 409
    assert cell.replica().version == f"{cell.generation}.0"
    fenced = cell.control("fence", {}, deadline_s="0.5")
    assert (fenced.json()["state"], fenced.json()["version"]) == ("ready", "")
    cell.await_replica(lambda view: view.version == f"{cell.generation}.0")


@pytest.mark.usefixtures("before")
def test_the_load_of_the_servers_is_known_while_all_serve(cell: Cell) -> None:
    async def read_load() -> EngineLoad | None:
        reader = EngineLoadReader(cell.paths.rendezvous_dir, cell.name, cell.service_key)
        try:
            return await reader.read()
        finally:
            await reader.close()

    cell.control("serve", {"version": f"{cell.generation}.0"})
    load = asyncio.run(read_load())
    assert load is not None
    assert (load.waiting_requests, 0.0 <= load.cache_share < 1.0) == (0, True)
    cell.control("fence", {}, deadline_s="0.5")
    assert asyncio.run(read_load()) is None
    cell.await_replica(lambda view: view.state == "serving")


def test_a_lost_senders_pause_ends_with_old_weights(cell: Cell, before: ReplicaView) -> None:
    cell.control("serve", {"version": f"{cell.generation}.1"})
    cell.control("fence", {}, deadline_s=f"{scaled(1.0)}")
    paused = cell.control("pause_generation", {"mode": "retract"}, deadline_s=f"{scaled(1.0)}")
    assert paused.status_code == 200
    after = cell.await_replica(lambda view: view.state == "serving")
    assert (after.incarnation, after.version) == (before.incarnation, f"{cell.generation}.1")
    assert cell.generate([5, 6, 7], max_new_tokens=4, temperature=0)["output_ids"]


@pytest.mark.usefixtures("before")
def test_a_server_is_traced_from_when_it_serves_the_weights_before_a_chosen_step(
    cell: Cell,
) -> None:
    cell.control("serve", {"version": f"{cell.generation}.{TRACED_STEP - 1}"})
    trace = cell.paths.profile(TRACED_STEP, "cell-0-0-TP-0.trace.json.gz")

    def is_traced() -> bool:
        cell.generate([5, 6, 7], max_new_tokens=8, temperature=0)
        return trace.exists()

    wait_for(is_traced, why=cell.logs)
    assert cell.paths.list_profiles() == [trace]
    assert b"aten::" in gzip.decompress(trace.read_bytes())


@pytest.mark.usefixtures("before")
def test_a_server_and_its_scheduler_write_their_stacks_when_asked(cell: Cell) -> None:
    request_stacks(cell.job.pid, with_descendants=True)
    logs = [*cell.paths.root.rglob("replica-0.*.log")]
    wait_for(lambda: any("in event_loop" in log.read_text(errors="replace") for log in logs))
    assert cell.generate([5, 6, 7], max_new_tokens=1)["output_ids"], "all live on"


@pytest.mark.last
def test_a_hung_scheduler_is_replaced_and_a_job_that_ends_leaves_no_process(
    cell: Cell, before: ReplicaView
) -> None:
    """The server is killed after its forks, and the job is stopped after its start."""
    cell.scheduler().suspend()
    cell.await_replica(lambda view: view.incarnation > before.incarnation)
    assert (
        f"was unresponsive for {HEALTH_TIMEOUT_S:.0f} s"
        in events_of(cell.paths, "replica_died")[-1]["reason"]
    )
    await_processes(cell, 3)
    assert_leaves_none(cell, signal.SIGKILL)
    cell.start()
    await_processes(cell, 1)
    assert_leaves_none(cell, signal.SIGTERM)


def await_processes(cell: Cell, count: int) -> None:
    wait_for(lambda: len(cell.engine_processes()) >= count, why=cell.logs)


def assert_leaves_none(cell: Cell, stop: signal.Signals) -> None:
    engine = cell.engine_processes()
    assert engine
    cell.job.send_signal(stop)
    code = cell.job.wait(scaled(15))
    if stop is signal.SIGTERM:
        assert (code, alive(engine)) == (0, [])
    else:
        wait_for(lambda: not alive(engine))


CLOSED_ROUTES = {
    "configure_logging": {"log_requests": True, "dump_requests_folder": "/tmp/dumped"},
    "update_weight_version": {"new_version": "9.9"},
    "pause_generation": {"mode": "retract"},
    "abort_request": {"abort_all": True},
    "generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}},
}
"""Requests that a stranger on the node could send to a server without keys."""


def test_strangers_on_the_node_get_nothing_of_a_server(cell: Cell, before: ReplicaView) -> None:
    def ask(route: str, key: str) -> int:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = CLOSED_ROUTES[route]
        url = f"{before.url}/{route}"
        return httpx.post(url, json=body, headers=headers, trust_env=False).status_code

    assert {ask(route, "") for route in CLOSED_ROUTES} == {401}
    assert {ask(route, before.keys.api) for route in CLOSED_ROUTES if route != "generate"} == {401}
    assert ask("abort_request", before.keys.admin) == ask("generate", before.keys.api) == 200


def test_keys_of_a_server_are_in_no_command_line_environment_or_log(
    cell: Cell, before: ReplicaView
) -> None:
    keys = (before.keys.api, before.keys.admin)
    assert min(map(len, keys)) >= 32
    shown = [
        *(" ".join(process.cmdline()) for process in cell.engine_processes()),
        *(str(process.environ()) for process in cell.engine_processes()),
        *(path.read_text(errors="replace") for path in cell.paths.root.rglob("*.log")),
    ]
    assert any("(hidden)" in text for text in shown), "SGLang logs its arguments"
    assert not [text for text in shown for key in keys if key in text]

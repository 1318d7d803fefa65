"""The trainer's end of an update keeps its pipeline and its deadlines without a model."""

import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.recipe.sections.inference import WeightsConfig
from areal_hpc.rundir import rendezvous
from areal_hpc.rundir.jobs import STOPPED_EXIT_CODE
from areal_hpc.weights.broadcast import BroadcastSession
from areal_hpc.weights.process_group import UpdateProcessGroup
from areal_hpc.weights.publisher import Publisher
from areal_hpc.weights.replicas import ReplicaClient, ReplicaKey
from areal_hpc.weights.update import Update
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.process_commands import start_job_process
from tests.support.scripted_sglang import LoopThread, StandInRelay
from tests.support.service_keys import SERVICE_KEY
from tests.support.waiting import await_endpoint, wait_for
from tests.support.weight_updates import (
    WITHOUT_MODEL,
    await_outdated,
    publishing,
    raise_if_failed,
    specs_of,
)

BUCKET_BYTES = 4096
WEIGHTS = {f"norm.{at}.weight": torch.ones(BUCKET_BYTES // 4) for at in range(6)}
"""Weights that each fill a bucket."""
UPDATE_TIMEOUT_S = scaled(3.0)
LOST = 32
"""Number of lost replicas: in turn they take longer than any busy machine adds to one wait."""
SOON_S = scaled(30.0)
"""No wait of torch's own is as short."""
PEER = """
import sys, time
from tests.support.deadlines import scaled
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
print("imported", flush=True)
name, port = input().split()
store = c10d.PrefixStore(name, dist.TCPStore("127.0.0.1", int(port), 2, False))
group, _ = c10d._new_process_group_helper(
    2, 1, [], c10d.Backend("gloo"), store, group_name=name, timeout=timedelta(seconds=scaled(30))
)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("timeout_s", "is_refused", "message"),
    [(0.3, False, "did not form"), (600, True, "a member reported failure")],
)
def test_a_group_that_nobody_joins_is_given_up_in_time_and_a_refused_one_at_once(
    timeout_s: float, is_refused: bool, message: str
) -> None:
    group = UpdateProcessGroup(f"lonely-{is_refused}", "127.0.0.1", 2, "gloo", timeout_s)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=message):
        group.join(lambda: is_refused)
    assert time.monotonic() - began < SOON_S
    group.abandon()


def test_a_broadcast_that_nobody_takes_is_given_up_in_time() -> None:
    limit_s = scaled(2)
    command = [sys.executable, "-c", PEER]
    with subprocess.Popen(
        command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        assert peer.stdout.readline() == "imported\n"
        group = UpdateProcessGroup("stuck", "127.0.0.1", 2, "gloo", timeout_s=limit_s)
        peer.stdin.write(f"{group.name} {group.port}\n")
        peer.stdin.flush()
        group.join(lambda: False)
        began = time.monotonic()
        with pytest.raises(
            WeightSyncError, match=rf"did not complete within {limit_s:.0f} s|Timed out"
        ):
            group.broadcast([torch.zeros(64 << 20, dtype=torch.uint8)], lambda: False)
        group.abandon()
        assert time.monotonic() - began < SOON_S
        peer.kill()


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Return the address of a host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def lost(silent_url: str) -> list[ReplicaKey]:
    return [ReplicaKey(f"cell-{at:02}", 0, 1, 1, silent_url, 0.0) for at in range(LOST)]


def test_replicas_lost_together_cost_as_much_as_one(lost: list[ReplicaKey], tmp_path: Path) -> None:
    weights = {"norm.weight": torch.zeros(4)}
    exported = iter(weights.items())
    with publishing(tmp_path, cells=LOST, update_timeout_s=UPDATE_TIMEOUT_S) as publisher:
        began = time.monotonic()
        report = publisher.transport.update(
            WeightVersion(1, 0), specs_of(weights), exported, lost, WITHOUT_MODEL
        )
        took_s = time.monotonic() - began
    assert [*report.failed] == lost
    assert next(exported, None) is None, "exporting is a collective: always drained"
    assert took_s < (LOST - 1) * UPDATE_TIMEOUT_S, (
        "one wait for the fence and one to say that it is over"
    )


def test_a_group_that_is_late_for_a_step_is_left_out(lost: list[ReplicaKey]) -> None:
    punctual, late = (
        BroadcastSession(
            UpdateProcessGroup(key.cell, "127.0.0.1", 2, "gloo", UPDATE_TIMEOUT_S),
            [ReplicaClient(key, SERVICE_KEY, 1, UPDATE_TIMEOUT_S)],
            WeightsConfig(),
        )
        for key in lost[:2]
    )
    is_over, step_s = threading.Event(), scaled(0.5)

    def doze(session: BroadcastSession) -> None:
        if session is late:
            is_over.wait(scaled(60))

    with ThreadPoolExecutor() as pool:
        update: Update[BroadcastSession] = Update(pool, step_s=step_s)
        update.live = [punctual, late]
        update.run_step("doze", doze)
        is_over.set()
    assert update.live == [punctual]
    assert [*update.failed] == [lost[1]]
    assert f"doze took longer than {step_s:g} s" in str(update.failed[lost[1]])
    punctual.abandon()


class SecondRelay(StandInRelay):
    endpoint = "control-cell-1"


@contextmanager
def running(relay: StandInRelay) -> Iterator[None]:
    loop = LoopThread()
    relay.show("http://127.0.0.1:1", state="ready")
    loop.run(relay.start())
    try:
        yield
    finally:
        loop.run(relay.stop())
        loop.stop()


def test_a_vanished_cell_is_waited_for_once_and_heard_when_it_returns(
    tmp_path: Path, silent_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_s = scaled(1.0)
    monkeypatch.setattr("areal_hpc.weights.publisher._DISCOVERY_WAIT_S", wait_s)
    monkeypatch.setattr("areal_hpc.weights.publisher._CELL_TIMEOUT_S", 3 * wait_s)
    rendezvous.publish_endpoint(tmp_path, "control-cell-1", silent_url)
    waits_s = []
    with (
        publishing(tmp_path, cells=3) as sender,  # one has not appeared yet
        running(StandInRelay(tmp_path, SERVICE_KEY)),
    ):
        for _ in range(6):
            began = time.monotonic()
            assert [key.cell for key, _ in sender.discover_replicas()] == ["cell-0"]
            waits_s.append(time.monotonic() - began)
        assert waits_s[0] >= wait_s
        assert statistics.median(waits_s) < wait_s, "time goes by whenever it is waited for"
        with running(SecondRelay(tmp_path, SERVICE_KEY)):
            wait_for(
                lambda: {key.cell for key, _ in sender.discover_replicas()} == {"cell-0", "cell-1"}
            )


@contextmanager
def scripted_relay(directory: Path, *arguments: str) -> Iterator[None]:
    module = "tests.integration.trainer.scripted_relay"
    command = [sys.executable, "-m", module, "cell-0", str(directory), *arguments]
    process = subprocess.Popen(command, cwd=CHECKOUT)
    try:
        await_endpoint(directory, "control-cell-0")
        yield
    finally:
        process.kill()
        process.wait()


def trainer(directory: Path, update_timeout_s: float) -> AbstractContextManager[Publisher]:
    return publishing(
        directory,
        bucket_bytes=BUCKET_BYTES,
        update_timeout_s=update_timeout_s,
    )


def test_the_next_bucket_is_gathered_while_one_is_loaded_and_no_third(tmp_path: Path) -> None:
    folder = tmp_path / "held"
    folder.mkdir()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for at, parameter in enumerate(WEIGHTS.items()):
            if at > 1:
                assert (folder / f"called-{at - 1}").exists(), "two buckets at most at a time"
            yield parameter

    def let_go() -> None:
        for number in range(1, len(WEIGHTS)):
            wait_for((folder / f"called-{number + 1}").exists, every_s=0.01)
            (folder / f"go-{number}").touch()  # it was being loaded all the while

    with scripted_relay(tmp_path, "0", str(folder)), trainer(tmp_path, scaled(15)) as publisher:
        version = WeightVersion(1, 0)
        replicas = await_outdated(publisher, version)
        assert len(replicas) == 1
        threading.Thread(target=let_go, daemon=True).start()
        raise_if_failed(
            publisher.transport.update(
                version, specs_of(WEIGHTS), gathered(), replicas, WITHOUT_MODEL
            )
        )
        assert publisher.discover_outdated_training_replicas(version) == []


PATIENCE_S = 120.0


def test_a_stop_beside_a_group_that_was_given_up_is_a_stop(tmp_path: Path) -> None:
    config, log = tmp_path / "config.json", tmp_path / "log"
    config.write_text("{}")
    process = start_job_process("tests.support.ending_sender:run", config, log)
    try:
        assert process.wait(scaled(PATIENCE_S)) == STOPPED_EXIT_CODE, log.read_text()
    finally:
        process.kill()
    assert "a member reported failure" in log.read_text()

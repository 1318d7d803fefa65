"""How long lost replicas may hold up an update: their relays take calls and say nothing."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from areal_hpc.recipe.sections.weights import WeightsConfig
from areal_hpc.weights.replica_client import ReplicaClient
from areal_hpc.weights.report import ReplicaKey
from areal_hpc.weights.transports.broadcast import BroadcastSession
from areal_hpc.weights.transports.process_group import UpdateProcessGroup
from areal_hpc.weights.update_session import GroupUpdate
from areal_hpc.wire.weight_version import WeightVersion
from tests.support.fair_clock import FairClock
from tests.support.weight_updates import publishing, specs_of

UPDATE_TIMEOUT_S = 1.0


@pytest.fixture
def lost() -> Iterator[list[ReplicaKey]]:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield [ReplicaKey(f"cell-{at}", 0, 1, 1, url, 0.0) for at in range(8)]


def test_replicas_lost_together_cost_no_more_than_one(
    lost: list[ReplicaKey], tmp_path: Path
) -> None:
    weights = {"norm.weight": torch.zeros(4)}
    exported = iter(weights.items())
    with (
        publishing(tmp_path, cells=8, update_timeout_s=UPDATE_TIMEOUT_S) as publisher,
        FairClock() as clock,
    ):
        began = time.monotonic()
        report = publisher.publish(WeightVersion(1, 0), specs_of(weights), exported, lost)
        took_s = clock.since(began)
    assert [*report.failed] == lost
    assert next(exported, None) is None, "exporting is a collective: always drained"
    assert took_s < 7 * UPDATE_TIMEOUT_S, "one wait for the fence and one to say that it is over"


def test_a_group_that_is_late_for_a_step_is_left_out(lost: list[ReplicaKey]) -> None:
    punctual, late = (
        BroadcastSession(
            UpdateProcessGroup(key.cell, "127.0.0.1", 2, "gloo", UPDATE_TIMEOUT_S),
            [ReplicaClient(key, "key", 1, UPDATE_TIMEOUT_S)],
            WeightsConfig(),
        )
        for key in lost[:2]
    )
    is_over = threading.Event()

    def doze(session: BroadcastSession) -> None:
        if session is late:
            is_over.wait(60)

    with ThreadPoolExecutor() as pool:
        update: GroupUpdate[BroadcastSession] = GroupUpdate(pool, step_s=0.5)
        update.live = [punctual, late]
        update.each("doze", doze)
        is_over.set()
    assert update.live == [punctual]
    assert [*update.failed] == [lost[1]]
    assert "doze took longer than 0.5 s" in str(update.failed[lost[1]])
    punctual.abandon()

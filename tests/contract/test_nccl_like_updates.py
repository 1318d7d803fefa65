"""Updates over a group that fails as NCCL's keep the trainer alive and serve the remaining cells.

The group is `tests/support/nccl_like.py`; `tests/acceptance/test_update_under_fire.py` has real
replicas over gloo.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.jobs.config import TRAINER_WEIGHT_UPDATE_VARIABLES
from areal_hpc.weights import process_group
from areal_hpc.weights.process_group import UpdateProcessGroup, get_torch_group_timeout_s
from areal_hpc.weights.publisher import Publisher
from areal_hpc.wire.weight_version import WeightVersion
from tests.support import nccl_like
from tests.support.deadlines import scaled
from tests.support.nccl_like_cells import (
    BUCKET_BYTES,
    PATIENT_S,
    PHASES,
    WEIGHTS,
    Fault,
    NcclLikeCell,
    assert_served,
)
from tests.support.thoroughness import choose
from tests.support.waiting import wait_for
from tests.support.weight_updates import publish, publishing, raise_if_failed

CELLS, VICTIM = 2, 1
HANG_TIMEOUT_S = scaled(1.5)
TIMEOUTS_S = {"impatient": HANG_TIMEOUT_S, "patient": PATIENT_S}
PARTIES = {
    "server": Fault("breaks", "dies"),
    "scheduler": Fault("refuses", "dies"),
    "scheduler, unnoticed": Fault("none", "dies"),
    "scheduler, which hangs": Fault("none", "hangs"),
    "relay": Fault("breaks", "hangs"),
}
UNNOTICED_IN = ("communicator", "broadcast")
"""Phases in which an unreported death looks like a hang."""
CASES = [
    # Only a silent party is waited for until a deadline.
    ("impatient" if fault.answer == "none" else "patient", party, phase)
    for (party, fault), phase in itertools.product(PARTIES.items(), PHASES)
    if fault != ("none", "dies") or phase in UNNOTICED_IN
]
QUICK_PHASES = {"communicator", "broadcast", "verify"}
"""Phases of every run; the others are for the thorough profile."""
REPRESENTATIVES = [case for case in CASES if case[2] in QUICK_PHASES]


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave torch as it comes until a publisher changes it, and forbid the end of the process."""
    for name in TRAINER_WEIGHT_UPDATE_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    nccl_like.register()
    yield
    nccl_like.end_all()
    assert nccl_like.ENDED == []


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[list[NcclLikeCell]]:
    cells_of_run = [NcclLikeCell(f"cell-{index}", tmp_path) for index in range(CELLS)]
    yield cells_of_run
    nccl_like.end_all()
    for cell in cells_of_run:
        cell.close()


@pytest.fixture
def publisher(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Publisher]:
    with publishing(
        tmp_path,
        cells=CELLS,
        backend=nccl_like.BACKEND,
        replicas_per_group=1,
        bucket_bytes=BUCKET_BYTES,
        update_timeout_s=TIMEOUTS_S[getattr(request, "param", "patient")],
    ) as publisher:
        yield publisher


def test_every_replica_gets_every_bucket(cells: list[NcclLikeCell], publisher: Publisher) -> None:
    for step in range(2):
        raise_if_failed(publish(publisher, WeightVersion(1, step), WEIGHTS, CELLS))
        assert_served(cells, f"1.{step}")


@pytest.mark.parametrize(
    ("publisher", "party", "phase"), choose(CASES, *REPRESENTATIVES), indirect=["publisher"]
)
def test_a_party_that_is_lost_costs_its_own_group_alone(
    cells: list[NcclLikeCell], publisher: Publisher, party: str, phase: str
) -> None:
    cells[VICTIM].fault = (*PHASES[phase], PARTIES[party])
    version, began = WeightVersion(1, 0), time.monotonic()
    report = publish(publisher, version, WEIGHTS, CELLS)
    assert time.monotonic() - began < PATIENT_S, "another deadline was waited for"
    assert [key.cell for key in report.ok] == ["cell-0"]
    assert [key.cell for key in report.failed] == ["cell-1"]
    assert (cells[0].served, cells[VICTIM].served) == (str(version), "")
    cells[VICTIM].restart()
    wait_for(lambda: len(publisher.discover_outdated_training_replicas(version)) == 1)
    raise_if_failed(publish(publisher, version, WEIGHTS))
    assert_served(cells, str(version))


def test_a_group_fails_whole_and_is_served_apart(cells: list[NcclLikeCell], tmp_path: Path) -> None:
    version = WeightVersion(1, 0)
    with publishing(
        tmp_path,
        cells=CELLS,
        backend=nccl_like.BACKEND,
        replicas_per_group=2,
        bucket_bytes=BUCKET_BYTES,
        update_timeout_s=PATIENT_S,
    ) as sender:
        cells[VICTIM].fault = (*PHASES["broadcast"], PARTIES["scheduler"])
        began = time.monotonic()
        report = publish(sender, version, WEIGHTS, CELLS)
        assert time.monotonic() - began < PATIENT_S
        assert (report.ok, len(report.failed)) == ((), CELLS)
        report = publish(sender, version, WEIGHTS, CELLS)
        assert [key.cell for key in report.ok] == ["cell-0"], "its fellow is still lost"
        cells[VICTIM].restart()
        wait_for(lambda: len(sender.discover_outdated_training_replicas(version)) == 1)
        raise_if_failed(publish(sender, version, WEIGHTS))
        assert_served(cells, str(version))


def take_part(member: nccl_like.NcclLikeGroup, dies: bool) -> None:
    member.make_communicator()
    if dies:
        member.die()


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_the_stand_in_does_end_the_process(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Without this end of the process the tests of this file prove nothing."""
    for variables in (
        {},
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        TRAINER_WEIGHT_UPDATE_VARIABLES,
    ):
        with monkeypatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            sender = UpdateProcessGroup(
                f"{fault}{len(variables)}", "127.0.0.1", 2, nccl_like.BACKEND, scaled(0.4)
            )
            monkeypatch.setattr(process_group, "get_torch_group_timeout_s", lambda *_: 0.1)
            sender.join(lambda: False)
        member = nccl_like.join_as_member("127.0.0.1", sender.port, sender.name, 1, 2)
        receiving = threading.Thread(target=take_part, args=(member, fault == "dies"))
        receiving.start()
        with pytest.raises(WeightSyncError, match=r"network error|did not complete"):
            sender.broadcast([torch.zeros(4)], lambda: False)
        if variables is not TRAINER_WEIGHT_UPDATE_VARIABLES:
            wait_for(lambda: nccl_like.ENDED, every_s=0.01)
            nccl_like.ENDED.clear()
        receiving.join()
        sender.abandon()


def test_torchs_deadline_of_an_nccl_group_comes_after_ours() -> None:
    for timeout_s in (0.5, 120.0, 3600.0):
        assert get_torch_group_timeout_s("nccl", timeout_s) > 2 * timeout_s

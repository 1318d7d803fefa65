"""Two trainer ranks send weights, each to its own replicas, over groups that fail as NCCL's.

`tests/contract/test_nccl_like_updates.py` has every way in which a receiver is lost.
"""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.support import nccl_like
from tests.support.nccl_like_cells import (
    BUCKET_BYTES,
    PATIENT_S,
    PHASES,
    WEIGHTS,
    Fault,
    NcclLikeCell,
    assert_served,
)
from tests.support.senders import Senders, sender_ranks
from tests.support.thoroughness import choose

CELLS = 4
SHARES = [[["cell-0", 0], ["cell-2", 0]], [["cell-1", 0], ["cell-3", 0]]]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NcclLikeCell]]:
    nccl_like.register()
    directory = tmp_path_factory.mktemp("rendezvous")
    cells_of_run = [NcclLikeCell(f"cell-{index}", directory) for index in range(CELLS)]
    yield cells_of_run
    nccl_like.end_all()
    for cell in cells_of_run:
        cell.close()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(WEIGHTS, path)
    return path


@pytest.fixture(scope="module")
def ranks(
    cells: list[NcclLikeCell], weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Senders]:
    with sender_ranks(
        cells[0].directory,
        tmp_path_factory.mktemp("logs"),
        cells=CELLS,
        backend=nccl_like.BACKEND,
        replicas_per_group=1,
        bucket_bytes=BUCKET_BYTES,
        update_timeout_s=PATIENT_S,
    ) as both:
        yield both


STEPS = itertools.count()
CASES = [*itertools.product((1, 2), (phase for phase in PHASES if phase != "begin"))]
"""Rank of the lost cell, 1 or 0, and the phase in which it is lost."""


@pytest.mark.parametrize(("victim", "phase"), choose(CASES, (1, "broadcast"), (2, "verify")))
def test_a_receiver_that_dies_costs_nobody_of_either_sender_the_update(
    cells: list[NcclLikeCell], ranks: Senders, weights: Path, victim: int, phase: str
) -> None:
    cells[victim].restart()  # joins anew
    cells[victim].fault = (*PHASES[phase], Fault("breaks", "dies"))
    step, began = next(STEPS), time.monotonic()
    report = ranks.publish(step, weights, CELLS)
    assert time.monotonic() - began < PATIENT_S, "a deadline was waited for"
    assert report["shares"] == SHARES
    assert list(report["failed"]) == [f"cell-{victim}"]
    others = [cell for cell in cells if cell is not cells[victim]]
    assert {name for name, _ in report["ok"]} == {cell.name for cell in others}
    assert_served(others, f"1.{step}")
    cells[victim].restart()
    report = ranks.publish(step, weights, 1)
    assert report["ok"] == [[f"cell-{victim}", 0]], "by the sender that had it before"
    assert [len(share) for share in report["shares"]] == ([0, 1] if victim == 1 else [1, 0])
    assert_served(cells, f"1.{step}")

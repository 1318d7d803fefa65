"""kill -9 at every point of a run, over real HTTP and a real file system."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.wire.awake_clock import MAX_GAP_S
from areal_hpc.wire.ledger import BatchManifest, FinishRunRequest, TicketRef
from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger
from tests.support.deadlines import scaled

Reply = TypeVar("Reply")

SHORT_TIMEOUT_S = scaled(1.5)
"""Cells are lost after this and a restarted ledger listens for a third of it."""


def test_a_restarted_ledger_grants_only_after_the_trainer_resumes(ledger: LedgerProcess) -> None:
    """Its last version may be of weights that were never saved. What ran is then issued again."""
    claim_next_number(ledger.paths.generations_dir)
    ledger.open_generation(1)
    ledger.form_batch(1)
    ledger.publish(1)
    lost = {grant.ref.ticket_id: grant.ref.attempt for grant in ledger.grants()}
    claim_next_number(ledger.paths.generations_dir)
    ledger.restart(cell_timeout_s=SHORT_TIMEOUT_S)
    with pytest.raises(HttpStatusError, match="was replaced by 2"):
        ledger.batch(2, generation=1)
    time.sleep(SHORT_TIMEOUT_S / 3)
    assert ledger.lease(wait_s=0.2).grants == []
    ledger.open_generation(2, base_step=0)
    assert ledger.lease(wait_s=0.2).grants == [], "the batch of step 1 is there to be trained again"
    ledger.publish(1, generation=2)
    again = {grant.ref.ticket_id: grant.ref.attempt for grant in ledger.grants("cell-1")}
    assert again.keys() == lost.keys()
    assert min(again.values()) > max(lost.values())


def test_tickets_of_a_silent_cell_are_reissued_and_settle_once(start_ledger: StartLedger) -> None:
    ledger = start_ledger(cell_timeout_s=SHORT_TIMEOUT_S, total_steps=2)
    ledger.open_generation()
    old = [grant.ref for grant in ledger.grants("cell-0")]
    new = [grant.ref for grant in ledger.grants("cell-1")]
    assert new == [TicketRef(ref.ticket_id, 2) for ref in old]
    ledger.settle(ledger.seal(old, "cell-0"), "cell-0")
    ledger.settle(ledger.seal(new, "cell-1"), "cell-1")
    manifest = ledger.batch(1).manifest
    assert manifest is not None
    assert [ticket.ref for ticket in manifest.tickets] == old
    ledger.settle(ledger.seal(old, "cell-0"), "cell-0")
    assert ledger.status().settled == 0


def test_a_ledger_that_stood_still_takes_no_ticket_from_a_cell(start_ledger: StartLedger) -> None:
    """As when the storage hangs in the middle of a write."""
    ledger = start_ledger(cell_timeout_s=MAX_GAP_S + scaled(1.0))
    ledger.open_generation()
    refs = [grant.ref for grant in ledger.grants("cell-0")]
    assert ledger.process.pid is not None
    os.kill(ledger.process.pid, signal.SIGSTOP)
    time.sleep(MAX_GAP_S + 1.0 + scaled(1.0))
    os.kill(ledger.process.pid, signal.SIGCONT)
    assert ledger.lease("cell-1", wait_s=0.2).grants == [], "cell-0 could not be heard"
    ledger.lease("cell-0", held=refs, tickets=0)
    assert ledger.status().leased == len(refs)


def test_a_resuming_trainer_gets_its_unsaved_batches_verbatim(ledger: LedgerProcess) -> None:
    ledger.open_generation(1)
    first = [ledger.form_batch(1)]
    ledger.publish(1)
    first.append(ledger.form_batch(2))
    ledger.open_generation(2, base_step=0)
    assert [ledger.batch(step, generation=2).manifest for step in (1, 2)] == first
    assert ledger.lease(wait_s=0.2).grants == []
    ledger.publish(1, generation=2)
    ledger.publish(2, generation=2)
    assert ledger.status().trained == 4


def test_an_older_trainer_is_refused_with_409(ledger: LedgerProcess) -> None:
    ledger.open_generation(1)
    ledger.form_batch(1)
    ledger.open_generation(2)
    ledger.restart()
    calls = (
        lambda: ledger.batch(1, generation=1),
        lambda: ledger.publish(1, generation=1),
        lambda: ledger.open_generation(1),
        lambda: ledger.order("/finish", FinishRunRequest(1)),
        lambda: ledger.evaluate(0, 2),
    )
    for call in calls:
        with pytest.raises(HttpStatusError) as caught:
            call()
        assert caught.value.status == 409
        assert "a newer one has taken over" in caught.value.body


def test_a_superseded_ledger_cannot_form_a_batch_or_publish(start_ledger: StartLedger) -> None:
    """The new trainer has its own ledger: this one never hears of it except through the disk."""
    ledger = start_ledger(total_steps=2, max_head_offpolicyness=1)
    claim_next_number(ledger.paths.generations_dir)
    ledger.open_generation(1)
    ledger.form_batch(1)
    assert ledger.status().settled == 2, "enough for another batch"
    claim_next_number(ledger.paths.generations_dir)
    before = ledger.paths.ledger_state.read_bytes()
    for call in (lambda: ledger.batch(2), lambda: ledger.publish(1)):
        with pytest.raises(HttpStatusError, match="was replaced by 2"):
            call()
    assert not ledger.paths.manifest(2).exists()
    assert ledger.paths.ledger_state.read_bytes() == before


def test_cells_are_told_to_stop_by_a_ledger_started_after_the_end(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.order("/finish", FinishRunRequest(1))
    assert ledger.lease().stop
    ledger.paths.finished_marker.touch()
    ledger.restart()
    assert ledger.lease().stop


def test_a_ledger_killed_at_random_trains_each_ticket_once(start_ledger: StartLedger) -> None:
    steps, batch_size = 60, 4
    ledger = start_ledger(
        cell_timeout_s=SHORT_TIMEOUT_S,
        batch_size=batch_size,
        total_steps=steps,
        max_head_offpolicyness=1,
    )
    published = threading.Event()

    def until_answered(call: Callable[[], Reply]) -> Reply:
        while True:
            try:
                return call()
            except HttpStatusError:
                raise
            except ClusterError:
                time.sleep(0.01)

    def work(cell: str) -> None:
        while not published.is_set():
            reply = until_answered(partial(ledger.lease, cell, 2, wait_s=0.1))
            refs = [grant.ref for grant in reply.grants]
            time.sleep(0.01)
            if refs:
                sealed = ledger.seal(refs, cell)
                until_answered(partial(ledger.settle, sealed, cell))

    def train() -> list[BatchManifest]:
        until_answered(ledger.open_generation)
        manifests = []
        for step in range(1, steps + 1):
            while (
                manifest := until_answered(partial(ledger.batch, step, 1, 0.2)).manifest
            ) is None:
                pass
            manifests.append(manifest)
            until_answered(partial(ledger.publish, step))
        return manifests

    try:
        cells = [ledger.threads.submit(work, f"cell-{i}") for i in range(3)]
        trainer = ledger.threads.submit(train)
        rng = random.Random(0)
        for _ in range(4):
            time.sleep(rng.uniform(0.2, 0.5))
            ledger.restart()
        manifests = trainer.result(100.0)
        published.set()
        for cell in cells:
            cell.result(60.0)
        times_trained = Counter(t.ref.ticket_id for m in manifests for t in m.tickets)
        assert set(times_trained.values()) == {1}
        assert times_trained.total() == steps * batch_size
        on_disk = [read_manifest(ledger.paths, step) for step in range(1, steps + 1)]
        assert on_disk == manifests
    finally:
        published.set()

"""The ledger survives kill -9 at every point of a run, an evaluation and a curriculum."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from areal_hpc.errors import ClusterError, HttpStatusError
from areal_hpc.rundir.files import claim_next_number
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.wire.awake_clock import MAX_GAP_S
from areal_hpc.wire.ledger import (
    BatchManifest,
    DropTicketRequest,
    EvaluateReply,
    FinishRunRequest,
    LeaseReply,
    TicketRef,
)
from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

Reply = TypeVar("Reply")

SHORT_TIMEOUT_S = scaled(1.5)
"""Cells are lost after this and a restarted ledger listens for a third of it."""


def test_a_restarted_ledger_grants_only_after_the_trainer_resumes(ledger: LedgerProcess) -> None:
    """Its last version may be of unsaved weights. Tickets in play are then issued again."""
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
    """The storage may hang in the middle of a write."""
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
    """The new trainer has its own ledger, and this one learns of it from the disk alone."""
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


def test_an_evaluation_survives_a_restart_once_it_is_done(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    assert ledger.evaluate(0, 3) == EvaluateReply(0, 3)
    grants = ledger.lease(tickets=1).grants  # four episodes: three for it, none for a group
    assert [grant.ref.eval_step for grant in grants] == [0, 0, 0]
    assert [(grant.task_index, grant.n_episodes) for grant in grants] == [(0, 1), (1, 1), (2, 1)]
    for grant, reward in zip(grants, (0.0, 0.5, 1.0), strict=True):
        ledger.report(grant.ref, reward)
    assert ledger.get_reward(0, 3) == 0.5
    ledger.restart()
    assert ledger.get_reward(0, 3) == 0.5
    assert json.loads(ledger.paths.evaluation(0).read_bytes())["rewards"] == [0.0, 0.5, 1.0]


def test_an_evaluation_begins_when_the_storage_can_be_read_again(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    unreadable = ledger.paths.evaluation(0)
    unreadable.mkdir(parents=True)
    with pytest.raises(HttpStatusError):
        ledger.evaluate(0, 1)
    unreadable.rmdir()
    assert ledger.evaluate(0, 1) == EvaluateReply(0, 1)
    (ref,) = (g.ref for g in ledger.grants(tickets=1) if g.ref.eval_step == 0)
    ledger.report(ref, 0.75)
    assert ledger.get_reward(0, 1) == 0.75


def test_an_evaluation_cut_short_by_a_crash_is_done_over(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 1)
    (first,) = (g.ref for g in ledger.grants(tickets=1) if g.ref.eval_step == 0)
    ledger.restart()
    ledger.report(TicketRef(0, first.attempt, 0), 1.0)
    assert ledger.evaluate(0, 1) == EvaluateReply(0, 1)
    (second,) = (g.ref for g in ledger.grants(tickets=1) if g.ref.eval_step == 0)
    assert second.attempt > first.attempt
    ledger.report(second, 0.25)
    assert ledger.get_reward(0, 1) == 0.25


def test_an_evaluation_of_abandoned_weights_is_done_over(ledger: LedgerProcess) -> None:
    def evaluate(generation: int, rewards: list[float]) -> float | None:
        ledger.evaluate(1, 1, generation)
        granted.extend(g.ref for g in ledger.grants(tickets=1) if g.ref.eval_step == 1)
        for ref, reward in zip(granted, rewards, strict=True):
            ledger.report(ref, reward)
        return ledger.get_reward(1, 1, generation)

    granted: list[TicketRef] = []
    ledger.open_generation(1)
    ledger.form_batch(1)
    ledger.publish(1)
    assert evaluate(1, [0.25]) == 0.25
    ledger.restart()
    ledger.open_generation(2, base_step=0)
    ledger.publish(1, generation=2)
    # The cell of the first generation repeats its report before the new one's comes.
    assert evaluate(2, [0.25, 0.75]) == 0.75
    ledger.open_generation(3, base_step=1)
    assert ledger.get_reward(1, 1, generation=3) == 0.75


def test_a_cell_gets_tickets_of_the_task_sets_that_it_takes(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 3)
    trained = ledger.lease("cell-0", splits=("train",)).grants
    assert [(grant.ref.eval_step, grant.n_episodes) for grant in trained] == [(-1, 4), (-1, 4)]
    judged = ledger.lease("evaluation", splits=("valid",)).grants
    assert [(grant.ref.eval_step, grant.task_index) for grant in judged] == [(0, 0), (0, 1), (0, 2)]
    again = ledger.lease("evaluation", held=[grant.ref for grant in judged], splits=("valid",))
    assert again == LeaseReply()


@pytest.mark.parametrize(("evaluated_step", "expected_done"), [(0, 2), (-1, 1)])
def test_episodes_of_an_evaluation_outlive_its_trainer_only_where_the_next_one_says_so(
    ledger: LedgerProcess, evaluated_step: int, expected_done: int
) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 3)
    first, second, _ = (grant.ref for grant in ledger.lease(splits=("valid",)).grants)
    ledger.report(first, 1.0)
    ledger.open_generation(2, evaluated_step=evaluated_step)
    ledger.evaluate(0, 3, generation=2)
    ledger.report(second, 1.0)
    assert ledger.evaluate(0, 3, generation=2) == EvaluateReply(expected_done, 3)


def test_only_tasks_without_a_reward_are_played_again_by_a_restarted_ledger(
    start_ledger: StartLedger,
) -> None:
    aime = {"there_are": 2, "n_samples": 2, "metrics": ["pass@k"]}
    wanted = {"valid": 1, "aime": 2}
    ledger = start_ledger(sets={"valid": {"there_are": 1}, "aime": aime})
    ledger.open_generation()
    assert ledger.evaluate_sets(0, wanted) == EvaluateReply(0, 3)
    grants = ledger.lease(tickets=2, splits=("valid",)).grants
    ids = [(grant.ref.ticket_id, grant.task_index, grant.n_episodes) for grant in grants]
    assert ids == [(0, 0, 1), (1_000_000, 0, 2), (1_000_001, 1, 2)]
    ledger.report(grants[0].ref, 1.0)
    ledger.report(grants[1].ref, 0.0, 1.0)
    ledger.drop(grants[2].ref, "it failed, and may be mended")
    ledger.restart()
    assert ledger.evaluate_sets(0, wanted) == EvaluateReply(2, 3)
    (again,) = ledger.lease(tickets=2, splits=("valid",)).grants
    assert again.ref.ticket_id == 1_000_001
    ledger.drop(again.ref, "it kept failing")
    row = ledger.evaluate_sets(0, wanted).metrics
    assert row is not None
    values = {name: value for name, value in row.items() if not name.endswith(("_low", "_high"))}
    assert values == {
        "eval/reward": 1.0,
        "evaluation/valid/avg@1": 1.0,
        "evaluation/aime/avg@2": 0.25,
        "evaluation/aime/pass@2": 0.5,
    }
    assert row["evaluation/aime/pass@2_low"] < 0.1
    assert row["evaluation/aime/pass@2_high"] > 0.9
    evaluation = json.loads(ledger.paths.evaluation(0, "aime").read_bytes())
    assert evaluation["samples"] == [[0.0, 1.0], [0.0, 0.0]]
    assert evaluation["failures"] == {"1": "it kept failing"}


CURRICULUM = {
    "curriculum": "tests.integration.ledger.test_crashes:untried",
    "sys_path": [str(CHECKOUT)],
}


def untried(history: dict[str, Any]) -> Any:
    """Select a task for the ledger's process, never the same one twice."""
    if not np.isnan(history["reward"]).any():
        raise RuntimeError("all were tried")
    return np.isnan(history["reward"])


def test_groups_that_are_over_decide_what_is_drawn_next(start_ledger: StartLedger) -> None:
    ledger = start_ledger(n_train_tasks=4, **CURRICULUM)
    ledger.open_generation()
    trained = ledger.grants("cell-0", tickets=1)
    turned_away = ledger.grants("cell-1", tickets=1)
    first = [grant.task_index for grant in (*trained, *turned_away)]
    assert len(set(first)) == 2
    ledger.settle(ledger.seal([grant.ref for grant in trained]))
    drop = DropTicketRequest("cell-1", turned_away[0].ref, "all 1", "filtered", [1.0] * 4)
    ledger.order("/drop", drop)
    ledger.restart(cell_timeout_s=scaled(1.5))  # it listens for a third of that
    assert ledger.batch(1).settled == 1
    second = [grant.task_index for grant in ledger.grants("cell-0", tickets=1)]
    assert not set(second) & set(first)
    assert len((ledger.paths.root / "curriculum.jsonl").read_text().splitlines()) == 2


def test_a_curriculum_that_fails_is_told_to_the_trainer(start_ledger: StartLedger) -> None:
    ledger = start_ledger(n_train_tasks=2, **CURRICULUM)
    ledger.open_generation()
    ledger.form_batch(1)
    ledger.publish(1)
    assert not ledger.lease(tickets=2).grants
    assert "RuntimeError: all were tried" in ledger.batch(2).trouble

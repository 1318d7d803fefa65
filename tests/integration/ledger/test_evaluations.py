"""Evaluations through restarts of the ledger and the trainer."""

import json

import pytest

from areal_hpc.wire.ledger import EvaluateReply, LeaseReply, TicketRef
from tests.integration.ledger.ledger_process import LedgerProcess


def test_an_evaluation_survives_a_restart_once_it_is_done(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    assert ledger.evaluate(0, 3) == EvaluateReply(0, 3)
    grants = ledger.lease(tickets=1).grants  # four episodes: three for it, none for a group
    assert [grant.ref.eval_step for grant in grants] == [0, 0, 0]
    assert [(grant.task_index, grant.n_episodes) for grant in grants] == [(0, 1), (1, 1), (2, 1)]
    for grant, reward in zip(grants, (0.0, 0.5, 1.0), strict=True):
        ledger.report(grant.ref, reward)
    assert ledger.evaluate(0, 3) == EvaluateReply(3, 3, 0.5)
    ledger.restart()
    assert ledger.evaluate(0, 3) == EvaluateReply(3, 3, 0.5)
    assert json.loads(ledger.paths.evaluation(0).read_bytes())["rewards"] == [0.0, 0.5, 1.0]


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
    assert ledger.evaluate(0, 1).mean_reward == 0.25


def test_an_evaluation_of_abandoned_weights_is_done_over(ledger: LedgerProcess) -> None:
    def evaluate(generation: int, rewards: list[float]) -> EvaluateReply:
        ledger.evaluate(1, 1, generation)
        granted.extend(g.ref for g in ledger.grants(tickets=1) if g.ref.eval_step == 1)
        for ref, reward in zip(granted, rewards, strict=True):
            ledger.report(ref, reward)
        return ledger.evaluate(1, 1, generation)

    granted: list[TicketRef] = []
    ledger.open_generation(1)
    ledger.form_batch(1)
    ledger.publish(1)
    assert evaluate(1, [0.25]).mean_reward == 0.25
    ledger.restart()
    ledger.open_generation(2, base_step=0)
    ledger.publish(1, generation=2)
    # The cell of the first generation repeats its report before the new one's comes.
    assert evaluate(2, [0.25, 0.75]).mean_reward == 0.75
    ledger.open_generation(3, base_step=1)
    assert ledger.evaluate(1, 1, generation=3).mean_reward == 0.75


def test_a_cell_gets_tickets_of_the_task_sets_that_it_takes(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 3)
    trained = ledger.lease("cell-0", splits=("train",)).grants
    assert [(grant.ref.eval_step, grant.n_episodes) for grant in trained] == [(-1, 4), (-1, 4)]
    judged = ledger.lease("evaluation", splits=("valid",)).grants
    assert [(grant.ref.eval_step, grant.task_index) for grant in judged] == [(0, 0), (0, 1), (0, 2)]
    assert ledger.lease("evaluation", held=[one.ref for one in judged], splits=("valid",)) == (
        LeaseReply()
    )


def test_another_evaluation_takes_the_place_of_one_that_is_under_way(ledger: LedgerProcess) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 2)
    given_up = [grant.ref for grant in ledger.lease(splits=("valid",)).grants]
    ledger.report(given_up[0], 1.0)
    assert ledger.evaluate(0, 2) == EvaluateReply(1, 2)
    assert ledger.evaluate(1, 2) == EvaluateReply(0, 2)
    ledger.report(given_up[1], 1.0)  # its episode may have gone on with other weights
    assert ledger.evaluate(1, 2) == EvaluateReply(0, 2)
    assert ledger.evaluate(0, 2) == EvaluateReply(0, 2)
    assert not ledger.paths.evaluation(0).exists()


@pytest.mark.parametrize(("evaluated_step", "done"), [(0, 1), (-1, 0)])
def test_an_evaluation_outlives_its_trainer_only_where_the_next_one_says_so(
    ledger: LedgerProcess, evaluated_step: int, done: int
) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 2)
    ledger.report(ledger.lease(splits=("valid",)).grants[0].ref, 1.0)
    ledger.open_generation(2, evaluated_step=evaluated_step)
    assert ledger.evaluate(0, 2, generation=2) == EvaluateReply(done, 2)

"""Evaluations through restarts of the ledger and the trainer."""

import json

import pytest

from areal_hpc.wire.ledger import EvaluateReply, LeaseReply, TicketRef
from tests.integration.ledger.ledger_process import LedgerProcess, StartLedger


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
    again = ledger.lease("evaluation", held=[one.ref for one in judged], splits=("valid",))
    assert again == LeaseReply()


@pytest.mark.parametrize(("evaluated_step", "done"), [(0, 2), (-1, 1)])
def test_episodes_of_an_evaluation_outlive_its_trainer_only_where_the_next_one_says_so(
    ledger: LedgerProcess, evaluated_step: int, done: int
) -> None:
    ledger.open_generation()
    ledger.evaluate(0, 3)
    first, second, _ = (one.ref for one in ledger.lease(splits=("valid",)).grants)
    ledger.report(first, 1.0)
    ledger.open_generation(2, evaluated_step=evaluated_step)
    ledger.evaluate(0, 3, generation=2)
    ledger.report(second, 1.0)
    assert ledger.evaluate(0, 3, generation=2) == EvaluateReply(done, 3)


def test_only_tasks_without_a_reward_are_played_again_by_a_restarted_ledger(
    start_ledger: StartLedger,
) -> None:
    aime = {"there_are": 2, "n_samples": 2, "metrics": ["pass@k"]}
    wanted = {"valid": 1, "aime": 2}
    ledger = start_ledger(sets={"valid": {"there_are": 1}, "aime": aime})
    ledger.open_generation()
    assert ledger.evaluate_sets(0, wanted) == EvaluateReply(0, 3)
    grants = ledger.lease(tickets=2, splits=("valid",)).grants
    ids = [(one.ref.ticket_id, one.task_index, one.n_episodes) for one in grants]
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
    kept = json.loads(ledger.paths.evaluation(0, "aime").read_bytes())
    assert kept["samples"] == [[0.0, 1.0], [0.0, 0.0]]
    assert kept["failures"] == {"1": "it kept failing"}

from areal_hpc.ledger.evaluation import EvaluationState
from areal_hpc.wire.ledger import TicketRef


def test_a_result_counts_once_and_only_of_a_task_that_is_evaluated() -> None:
    evaluation = EvaluationState(step=0, n_tasks=1)
    (ref,) = evaluation.lease_tickets("a", 1, 0.0)
    assert not evaluation.record_reward(TicketRef(1, 1, 0), 0.0)
    assert evaluation.record_reward(ref, 1.0)
    assert not evaluation.record_reward(ref, 0.0)
    assert evaluation.mean_reward == 1.0


def test_results_and_reports_of_another_evaluation_are_ignored() -> None:
    """Episodes of one that was given up go on for a while, maybe on later weights."""
    evaluation = EvaluationState(step=7, n_tasks=1)
    (ref,) = evaluation.lease_tickets("a", 1, 0.0)
    given_up = TicketRef(ref.ticket_id, ref.attempt, eval_step=5)
    assert not evaluation.record_reward(given_up, 1.0)
    evaluation.score_failed_task_zero(given_up, "timed out")
    assert evaluation.rewards == {}
    evaluation.reconcile_cell_report("a", [given_up], 1.0)
    assert evaluation.n_pending == 1


def test_a_task_is_leased_again_when_its_cell_is_silent_or_does_not_report_it() -> None:
    """The reply that granted it was lost, or the driver was restarted."""
    evaluation = EvaluationState(step=0, n_tasks=3)
    (lost,) = evaluation.lease_tickets("a", 1, 0.0)
    kept, unreported = evaluation.lease_tickets("b", 2, 0.0)
    evaluation.reconcile_cell_report("b", [kept], 20.0)
    assert evaluation.lease_tickets("b", 3, 20.0) == [TicketRef(unreported.ticket_id, 2, 0)]
    assert evaluation.expire_leases(10.0) == 1
    assert evaluation.lease_tickets("b", 3, 20.0) == [TicketRef(lost.ticket_id, 2, 0)]


def test_a_late_result_saves_the_second_run() -> None:
    evaluation = EvaluationState(step=0, n_tasks=1)
    (ref,) = evaluation.lease_tickets("a", 1, 0.0)
    evaluation.expire_leases(10.0)
    assert evaluation.record_reward(ref, 1.0)
    assert evaluation.n_pending == 0

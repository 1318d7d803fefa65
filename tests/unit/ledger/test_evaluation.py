from areal_hpc.ledger.evaluation import EvaluationSetPart, EvaluationState
from areal_hpc.wire.ledger import TicketRef


def evaluate(step: int, n_tasks: int) -> EvaluationState:
    return EvaluationState(step, {"valid": EvaluationSetPart(0, n_tasks)})


def test_a_task_is_leased_again_when_its_cell_is_silent_or_does_not_report_it() -> None:
    """The reply that granted it was lost, or the driver was restarted."""
    evaluation = evaluate(step=0, n_tasks=3)
    (lost,) = evaluation.lease_tickets("a", 1, 0.0)
    kept, unreported = evaluation.lease_tickets("b", 2, 0.0)
    evaluation.reconcile_cell_report("b", [kept], 20.0)
    assert evaluation.lease_tickets("b", 3, 20.0) == [TicketRef(unreported.ticket_id, 2, 0)]
    assert evaluation.expire_leases(10.0) == 1
    assert evaluation.lease_tickets("b", 3, 20.0) == [TicketRef(lost.ticket_id, 2, 0)]


def test_tasks_with_the_same_rewards_in_another_order_have_the_same_mean() -> None:
    evaluation = EvaluationState(0, {"aime": EvaluationSetPart(1, 2, n_samples=3)})
    first, second = evaluation.lease_tickets("a", 6, 0.0)
    assert evaluation.record_rewards(first, [0.1, 0.2, 0.3])
    assert evaluation.record_rewards(second, [0.3, 0.2, 0.1])
    ((_, result),) = evaluation.build_unwritten_results()
    assert result.rewards[0] == result.rewards[1]

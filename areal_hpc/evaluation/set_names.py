"""Evaluation sets in tickets, of whose numbers each has a range, and in metrics."""

TICKETS_PER_SET = 1_000_000
VALIDATION_SET_NAME = "valid"
"""The set of `valid_dataset`, which has number 0."""

STEP_OF_LOADED_WEIGHTS = 0
"""The step by which an evaluation without a trainer names the weights that its replicas load."""


def get_ticket_id_in_evaluation(set_number: int, task_index: int) -> int:
    return set_number * TICKETS_PER_SET + task_index


def split_ticket_id(ticket_id: int) -> tuple[int, int]:
    return divmod(ticket_id, TICKETS_PER_SET)


EVALUATION_METRIC_PREFIX = "evaluation/"
INTERVAL_BOUND_SUFFIXES = ("_low", "_high")
"""Behind a metric's name: its 95 % interval."""

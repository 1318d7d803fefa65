"""Names of evaluation sets in metrics, and the range of ticket ids that each set has."""

TICKETS_PER_SET = 1_000_000
VALIDATION_SET_NAME = "valid"
"""Name of the set of `valid_dataset`, whose number is 0."""
JUDGE_SET_NAME = "judge"
"""Name of the set whose reward shows whether training cheats its own: docs/reward-hacking.md."""

STEP_OF_LOADED_WEIGHTS = 0
"""Step number of the weights that replicas load in an evaluation without a trainer."""


def get_ticket_id_in_evaluation(set_number: int, task_index: int) -> int:
    return set_number * TICKETS_PER_SET + task_index


def split_ticket_id(ticket_id: int) -> tuple[int, int]:
    return divmod(ticket_id, TICKETS_PER_SET)


EVALUATION_METRIC_PREFIX = "evaluation/"
INTERVAL_BOUND_SUFFIXES = ("_low", "_high")
"""Suffixes of a metric's name for the bounds of its 95 % interval."""

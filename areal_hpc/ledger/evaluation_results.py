"""Results of evaluation sets in the run directory: which still hold, and their metrics."""

from collections.abc import Mapping

from areal_hpc.evaluation.set_metrics import SetSamples, build_metric_row, estimate_metrics
from areal_hpc.evaluation.ticket_numbers import VALIDATION_SET_NAME
from areal_hpc.ledger.config import LedgerEvaluationSet
from areal_hpc.metrics.step_metrics import VALIDATION_REWARD_METRIC
from areal_hpc.rundir import manifests
from areal_hpc.rundir.manifests import EvaluationResult, LedgerState
from areal_hpc.rundir.paths import RunPaths

EvaluationResults = dict[str, EvaluationResult]
"""By the names of sets."""


def read_current_results(
    paths: RunPaths, state: LedgerState, step: int, n_tasks_by_set: Mapping[str, int]
) -> EvaluationResults:
    """The results of these sets for weights that the run still has; sets without one are absent."""
    found = {}
    for name, n_tasks in n_tasks_by_set.items():
        result = manifests.read_evaluation(paths, step, name)
        if result is None or result.n_tasks != n_tasks:
            continue
        if state.has_run_kept_evaluated_weights(step, result.generation):
            found[name] = result
    return found


def compute_result_metrics(
    results: Mapping[str, EvaluationResult], sets: Mapping[str, LedgerEvaluationSet]
) -> dict[str, float]:
    """What the row of an evaluated step says of its sets."""
    row: dict[str, float] = {}
    for name, result in results.items():
        if name == VALIDATION_SET_NAME:
            row[VALIDATION_REWARD_METRIC] = result.mean_reward
        samples = SetSamples(result.list_sample_rewards(), result.answers)
        estimates = estimate_metrics(samples, sets[name].metrics, sets[name].pass_reward)
        row |= build_metric_row(name, estimates)
    return row

"""Held-out rewards compared task by task, with confidence."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from areal_hpc.evaluation.statistics import PairedComparison, compare_paired
from areal_hpc.evaluation.ticket_numbers import VALIDATION_SET_NAME
from areal_hpc.rundir.manifests import EvaluationResult

MIN_COMPARED_TASKS = 2
ResultsBySet = Mapping[str, Sequence[EvaluationResult]]


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Rewards of the same tasks twice, the second minus the first."""

    name: str
    before: float
    after: float
    comparison: PairedComparison


def compare_evaluations(
    results_by_run: Sequence[tuple[str, ResultsBySet, object]],
) -> Iterator[PairedDifference]:
    """The first and the last evaluation of each set, and the last ones of runs with equal tasks.

    A run stands with what names its held-out tasks. Pure.
    """
    for run, results_by_set, _ in results_by_run:
        for name, results in results_by_set.items():
            first, last = results[0], results[-1]
            title = f"{_name_set(run, name)}: step {first.step} to {last.step}"
            yield from _compare_if_equally_many_tasks(title, first, last)
    judged = [one for one in results_by_run if one[1]]
    for run, results_by_set, tasks in judged[1:]:
        other, its_results, its_tasks = judged[0]
        shared = [name for name in results_by_set if name in its_results]
        for name in shared if tasks == its_tasks else ():
            title = f"{_name_set(other, name)} to {run}, the last evaluation of each"
            yield from _compare_if_equally_many_tasks(
                title, its_results[name][-1], results_by_set[name][-1]
            )


def _name_set(run_name: str, set_name: str) -> str:
    return run_name if set_name == VALIDATION_SET_NAME else f"{run_name}, {set_name}"


def _compare_if_equally_many_tasks(
    title: str, before: EvaluationResult, after: EvaluationResult
) -> Iterator[PairedDifference]:
    n_tasks = len(after.rewards)
    if before is after or len(before.rewards) != n_tasks or n_tasks < MIN_COMPARED_TASKS:
        return
    comparison = compare_paired(before.rewards, after.rewards)
    yield PairedDifference(title, before.mean_reward, after.mean_reward, comparison)

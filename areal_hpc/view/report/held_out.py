"""Held-out rewards compared task by task, with confidence."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_hpc.errors import ShardError
from areal_hpc.rundir.manifests import EvaluationResult, list_evaluated_steps, read_evaluation
from areal_hpc.rundir.paths import RunPaths

CONFIDENCE_95 = statistics.NormalDist().inv_cdf(0.975)
MIN_TASKS = 2


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean difference of the same tasks' rewards, and half the width of its 95 % interval."""

    name: str
    before: float
    after: float
    difference: float
    half_width: float
    n_tasks: int

    @property
    def verdict(self) -> str:
        """What the interval says."""
        if abs(self.difference) <= self.half_width:
            return "no difference is shown"
        return "better" if self.difference > 0 else "worse"


def compare_paired(
    name: str, before: Sequence[float], after: Sequence[float]
) -> PairedDifference | None:
    """The difference of rewards of the same tasks, by a normal approximation; None of too few.

    Pure.
    """
    if len(before) != len(after) or len(before) < MIN_TASKS:
        return None
    differences = [late - early for early, late in zip(before, after, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return PairedDifference(
        name,
        statistics.fmean(before),
        statistics.fmean(after),
        statistics.fmean(differences),
        CONFIDENCE_95 * error,
        len(differences),
    )


def read_evaluations(paths: RunPaths, problems: list[str]) -> list[EvaluationResult]:
    """The evaluations of a run by step; what cannot be read is named in `problems`."""
    found = []
    for step in list_evaluated_steps(paths):
        try:
            if (result := read_evaluation(paths, step)) is not None:
                found.append(result)
        except ShardError as error:
            problems.append(str(error))
    return found


def compare_evaluations(
    results_by_run: Sequence[tuple[str, Sequence[EvaluationResult], object]],
) -> Iterator[PairedDifference]:
    """The first and the last evaluation of each run, and the last ones of runs with equal tasks.

    A run stands with its held-out task set. Pure.
    """
    for run, results, _ in results_by_run:
        if len(results) > 1:
            first, last = results[0], results[-1]
            name = f"{run}: step {first.step} to {last.step}"
            if (paired := compare_paired(name, first.rewards, last.rewards)) is not None:
                yield paired
    judged = [one for one in results_by_run if one[1]]
    for run, results, tasks in judged[1:]:
        other, its_results, its_tasks = judged[0]
        if tasks != its_tasks:
            continue
        name = f"{other} to {run}, the last evaluation of each"
        paired = compare_paired(name, its_results[-1].rewards, results[-1].rewards)
        if paired is not None:
            yield paired

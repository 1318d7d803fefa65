"""What the page about a run's evaluations shows: each set over steps, and each task's rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.evaluation.statistics import compare_paired, estimate_mean
from areal_hpc.evaluation.ticket_numbers import VALID_SET_NAME, get_ticket_id
from areal_hpc.rundir.manifests import EvaluationResult, read_evaluations_by_set
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import read_run_recipe

MAX_SHOWN_EVALUATIONS = 100
"""Of a set, the newest ones."""

JsonObject = dict[str, Any]


def describe_evaluations(paths: RunPaths) -> JsonObject:
    """Every evaluation set of a run with its results by step; why some cannot be read.

    Raises:
        RecipeError: The run's recipe is damaged.
    """
    problems: list[str] = []
    results = read_evaluations_by_set(paths, VALID_SET_NAME, problems)
    first_tickets = _get_first_ticket_id_by_set(read_run_recipe(paths.recipe))
    sets = [
        _describe_set(name, found[-MAX_SHOWN_EVALUATIONS:], first_tickets.get(name))
        for name, found in results.items()
    ]
    return {"sets": sets, "problem": "; ".join(problems)}


def _get_first_ticket_id_by_set(recipe: Mapping[str, Any]) -> dict[str, int]:
    """The first ticket of each set, by which its episodes are found."""
    sets = (recipe.get("evaluation") or {}).get("sets") or {}
    others = sorted(name for name in sets if name != VALID_SET_NAME)
    return {name: get_ticket_id(number, 0) for number, name in enumerate([VALID_SET_NAME, *others])}


def _describe_set(
    name: str, results: Sequence[EvaluationResult], first_ticket: int | None
) -> JsonObject:
    estimates = [estimate_mean(one.rewards) for one in results]
    return {
        "name": name,
        "tasks": results[-1].n_tasks,
        "samples": len(results[-1].list_samples()[0]),
        "first_ticket": first_ticket,
        "steps": [one.step for one in results],
        "mean": [one.value for one in estimates],
        "low": [one.low for one in estimates],
        "high": [one.high for one in estimates],
        "failures": [len(one.failures) for one in results],
        "rewards": [one.rewards for one in results],
        "compared": _compare_last_with_first(results[0], results[-1]),
    }


def _compare_last_with_first(first: EvaluationResult, last: EvaluationResult) -> JsonObject | None:
    """The last evaluation against the first one of the same tasks; None without two such."""
    if first is last or first.n_tasks != last.n_tasks:
        return None
    paired = compare_paired(first.rewards, last.rewards)
    return {
        "from": first.step,
        "to": last.step,
        "difference": paired.difference.value,
        "low": paired.difference.low,
        "high": paired.difference.high,
        "better": paired.better,
        "worse": paired.worse,
    }

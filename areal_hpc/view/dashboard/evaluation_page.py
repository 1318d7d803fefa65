"""Data of the page about a run's evaluations: each set over steps, and each task's rewards."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.evaluation.set_metrics import (
    DEFAULT_PASS_REWARD,
    SetSamples,
    estimate_metrics,
)
from areal_hpc.evaluation.set_names import (
    VALIDATION_SET_NAME,
    get_ticket_id_in_evaluation,
    split_ticket_id,
)
from areal_hpc.evaluation.statistics import compare_paired, estimate_mean
from areal_hpc.rundir.manifests import EvaluationResult, group_kept_evaluations
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import read_run_recipe
from areal_hpc.wire.trajectory import RowKind

MAX_SHOWN_EVALUATIONS = 100

JsonObject = dict[str, Any]


def build_evaluation_sets_page(paths: RunPaths) -> JsonObject:
    problems: list[str] = []
    results = group_kept_evaluations(paths, VALIDATION_SET_NAME, problems)
    configs = _read_set_configs(paths, problems)
    first_tickets = {
        name: get_ticket_id_in_evaluation(number, 0)
        for number, name in enumerate(_order_names(configs))
    }
    sets = []
    for name, results_of_set in results.items():
        shown = results_of_set[-MAX_SHOWN_EVALUATIONS:]
        further = _describe_further_metrics(shown, configs.get(name, {}))
        sets.append(_describe_set(name, shown, first_tickets.get(name)) | {"further": further})
    return {"sets": sets, "problem": "; ".join(problems)}


def _describe_set(
    set_name: str, results: Sequence[EvaluationResult], first_ticket: int | None
) -> JsonObject:
    estimates = [estimate_mean(result.rewards) for result in results]
    return {
        "name": set_name,
        "tasks": results[-1].n_tasks,
        "samples": len(results[-1].list_sample_rewards()[0]),
        "first_ticket": first_ticket,
        "steps": [result.step for result in results],
        "mean": [estimate.value for estimate in estimates],
        "low": [estimate.low for estimate in estimates],
        "high": [estimate.high for estimate in estimates],
        "failures": [len(result.failures) for result in results],
        "rewards": [result.rewards for result in results],
        "compared": _compare_last_with_first(results[0], results[-1]),
    }


def _describe_further_metrics(
    results: Sequence[EvaluationResult], config: Mapping[str, Any]
) -> list[JsonObject]:
    metrics = [metric for metric in config.get("metrics") or () if metric != "avg@k"]
    pass_reward = config.get("pass_reward", DEFAULT_PASS_REWARD)
    columns_by_name: dict[str, JsonObject] = {}
    keys = ("mean", "low", "high")
    for index, result in enumerate(results if metrics else ()):
        samples = SetSamples(result.list_sample_rewards(), result.answers)
        for name, estimate in estimate_metrics(samples, metrics, pass_reward).items():
            if not name.startswith("avg@"):
                empty = {key: [None] * len(results) for key in keys}
                columns = columns_by_name.setdefault(name, {"name": name, **empty})
                numbers = (estimate.value, estimate.low, estimate.high)
                for key, value in zip(keys, numbers, strict=True):
                    columns[key][index] = value
    return list(columns_by_name.values())


def _compare_last_with_first(first: EvaluationResult, last: EvaluationResult) -> JsonObject | None:
    """Compare the last evaluation with the first, if both have the same tasks; else None.

    The interval is infinite if there are too few tasks to show a difference.
    """
    if first is last or first.n_tasks != last.n_tasks:
        return None
    paired = compare_paired(first.rewards, last.rewards)
    return {
        "from": first.step,
        "to": last.step,
        "difference": paired.difference.value,
        "low": paired.difference.low,
        "high": paired.difference.high,
        "verdict": paired.verdict,
        "better": paired.better,
        "worse": paired.worse,
    }


def list_set_names(paths: RunPaths, problems: list[str]) -> list[str]:
    """Return the evaluation sets of a run by number; only `valid` if its recipe has no other.

    A damaged recipe is added to `problems`, and the rest of the run is shown all the same.
    """
    return _order_names(_read_set_configs(paths, problems))


def _order_names(names: Iterable[str]) -> list[str]:
    return [VALIDATION_SET_NAME, *sorted(name for name in names if name != VALIDATION_SET_NAME)]


def _read_set_configs(paths: RunPaths, problems: list[str]) -> JsonObject:
    """Read the section `evaluation.sets` of a run's recipe; errors are added to `problems`."""
    if not paths.recipe.exists():
        return {}
    try:
        recipe = read_run_recipe(paths.recipe)
    except RecipeError as error:
        problems.append(str(error))
        return {}
    section = recipe.get("evaluation") or {}
    sets = (section.get("sets") or {}) if isinstance(section, dict) else section
    if not isinstance(sets, dict):
        key = "evaluation.sets" if isinstance(section, dict) else "evaluation"
        problems.append(f"{key} of the run's recipe: expected keys and values, got {sets!r:.100}")
        return {}
    return {str(name): config if isinstance(config, dict) else {} for name, config in sets.items()}


def label_evaluation_rows(rows: Sequence[JsonObject], names: Sequence[str]) -> None:
    """Add to evaluation rows the name of their set and the number of their task in it."""
    for row in rows:
        if row["kind"] == RowKind.EVALUATION.label:
            number, task = split_ticket_id(row["ticket"])
            row["set"] = names[number] if number < len(names) else f"set {number}"
            row["set_task"] = task


def build_set_filters(names: Sequence[str]) -> list[JsonObject]:
    if len(names) < 2:
        return []
    return [
        {
            "name": name,
            "where": f"kind=evaluation and ticket>={get_ticket_id_in_evaluation(number, 0)} "
            f"and ticket<{get_ticket_id_in_evaluation(number + 1, 0)}",
        }
        for number, name in enumerate(names)
    ]

"""What the page about a run's evaluations shows: each set over steps, and each task's rewards."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_hpc.evaluation.set_metrics import (
    DEFAULT_PASS_REWARD,
    SetSamples,
    estimate_metrics,
)
from areal_hpc.evaluation.statistics import compare_paired, estimate_mean
from areal_hpc.evaluation.ticket_numbers import VALIDATION_SET_NAME, get_ticket_id_in_evaluation
from areal_hpc.rundir.manifests import EvaluationResult, read_kept_evaluations_by_set
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.dashboard.evaluation_set_names import prepend_valid_and_sort, read_set_configs
from areal_hpc.view.evaluations.evaluation_report import WrittenEstimate

MAX_SHOWN_EVALUATIONS = 100

JsonObject = dict[str, Any]


def build_evaluation_sets_page(paths: RunPaths) -> JsonObject:
    problems: list[str] = []
    results = read_kept_evaluations_by_set(paths, VALIDATION_SET_NAME, problems)
    configs = read_set_configs(paths, problems)
    first_tickets = {
        name: get_ticket_id_in_evaluation(number, 0)
        for number, name in enumerate(prepend_valid_and_sort(configs))
    }
    sets = []
    for name, found in results.items():
        shown = found[-MAX_SHOWN_EVALUATIONS:]
        described = _describe_set(name, shown, first_tickets.get(name))
        sets.append(
            described | {"further": _describe_further_metrics(shown, configs.get(name, {}))}
        )
    return {"sets": sets, "problem": "; ".join(problems)}


def _describe_set(
    set_name: str, results: Sequence[EvaluationResult], first_ticket: int | None
) -> JsonObject:
    estimates = [estimate_mean(one.rewards) for one in results]
    return {
        "name": set_name,
        "tasks": results[-1].n_tasks,
        "samples": len(results[-1].list_sample_rewards()[0]),
        "first_ticket": first_ticket,
        "steps": [one.step for one in results],
        "mean": [one.value for one in estimates],
        "low": [one.low for one in estimates],
        "high": [one.high for one in estimates],
        "failures": [len(one.failures) for one in results],
        "rewards": [one.rewards for one in results],
        "compared": _compare_last_with_first(results[0], results[-1]),
    }


def _describe_further_metrics(
    results: Sequence[EvaluationResult], config: Mapping[str, Any]
) -> list[JsonObject]:
    metrics = [one for one in config.get("metrics") or () if one != "avg@k"]
    pass_reward = config.get("pass_reward", DEFAULT_PASS_REWARD)
    found: dict[str, JsonObject] = {}
    for place, result in enumerate(results if metrics else ()):
        samples = SetSamples(result.list_sample_rewards(), result.answers)
        for name, one in estimate_metrics(samples, metrics, pass_reward).items():
            if not name.startswith("avg@"):
                empty = {key: [None] * len(results) for key in ("mean", "low", "high")}
                columns = found.setdefault(name, {"name": name, **empty})
                for key, value in (("mean", one.value), ("low", one.low), ("high", one.high)):
                    columns[key][place] = value
    return list(found.values())


def _compare_last_with_first(first: EvaluationResult, last: EvaluationResult) -> JsonObject | None:
    """The last evaluation against the first one of the same tasks; None without two such.

    So few tasks that they can show nothing have no interval.
    """
    if first is last or first.n_tasks != last.n_tasks:
        return None
    paired = compare_paired(first.rewards, last.rewards)
    difference = WrittenEstimate.from_estimate(paired.difference)
    return {
        "from": first.step,
        "to": last.step,
        "difference": difference.value,
        "low": difference.low,
        "high": difference.high,
        "verdict": paired.verdict,
        "better": paired.better,
        "worse": paired.worse,
    }

"""Names of the evaluation sets that recorded rows belong to."""

from collections.abc import Iterable, Sequence
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.evaluation.ticket_numbers import (
    VALIDATION_SET_NAME,
    get_ticket_id_in_evaluation,
    split_ticket_id,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import read_run_recipe
from areal_hpc.wire.trajectory import RowKind

JsonObject = dict[str, Any]


def list_set_names(paths: RunPaths, problems: list[str]) -> list[str]:
    """The evaluation sets of a run by their numbers; `valid` alone if its recipe has no other.

    A damaged recipe is told in `problems`: what else there is of the run is shown all the same.
    """
    return prepend_valid_and_sort(read_set_configs(paths, problems))


def prepend_valid_and_sort(names: Iterable[str]) -> list[str]:
    return [VALIDATION_SET_NAME, *sorted(name for name in names if name != VALIDATION_SET_NAME)]


def read_set_configs(paths: RunPaths, problems: list[str]) -> JsonObject:
    """The section `evaluation.sets` of a run's recipe; what is wrong with it in `problems`."""
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
    return {str(name): one if isinstance(one, dict) else {} for name, one in sets.items()}


def label_evaluation_rows(rows: Sequence[JsonObject], names: Sequence[str]) -> None:
    """Put into evaluation rows what their set is called and which of its tasks they played."""
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

"""Tables of `docs/attacks.md`: what stopped each attack on a sandbox, and what did alone."""

from collections.abc import Callable, Iterable
from typing import Any

from tests.support.results import read_results
from tests.support.tables import markdown

IN_JOB = " in a job"
"""Behind a runtime's name, of runs whose cells are jobs of Slurm."""


def table() -> str:
    """Runs on one machine, by attack; the words are those of the attack or of the sandbox's end."""
    return _render({name: found for name, found in _read_means().items() if IN_JOB not in name})


def table_of_jobs() -> str:
    """Runs whose cells are jobs of a devcluster."""
    return _render({name: found for name, found in _read_means().items() if IN_JOB in name})


def table_of_walls() -> str:
    """What each attack did where one wall was taken away."""
    found: dict[str, dict[str, str]] = read_results("walls", {})
    rows = [(name, found[name]["wall"], found[name]["without"]) for name in _sort(found)]
    return markdown(("attack", "wall that was taken away", "what the attack told then"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "attacks": table,
    "attacks in jobs": table_of_jobs,
    "walls": table_of_walls,
}


def _read_means() -> dict[str, dict[str, Any]]:
    means: dict[str, dict[str, Any]] = read_results("isolation", {})
    return {name: means[name] for name in sorted(means)}


def _render(means: dict[str, dict[str, Any]]) -> str:
    names = dict.fromkeys(name for found in means.values() for name in found)
    rows = [
        (name, *(_shorten(found.get(name, "")) for found in means.values()))
        for name in _sort(names)
    ]
    return markdown(("attack", *map(_name_column, means)), rows)


def _sort(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (int(name.split()[0]), name))


def _name_column(place: str) -> str:
    runtime, in_job, limits = place.partition(IN_JOB)
    return f"`{runtime}`{limits}" if in_job else f"`{runtime}`"


def _shorten(means: str) -> str:
    return means.replace("the sandbox is gone ", "") or "not there, or refused"

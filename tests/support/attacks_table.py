"""Table of `docs/security.md`: what stopped each attack on a sandbox, by runtime."""

from typing import Any

from tests.support.results import read_results
from tests.support.tables import markdown


def table() -> str:
    """By attack; the words are those of the attack itself, or of the sandbox's end."""
    means: dict[str, dict[str, Any]] = read_results("isolation", {})
    names = dict.fromkeys(name for found in means.values() for name in found)
    rows = [
        (name, *(_shorten(found.get(name, "")) for found in means.values()))
        for name in sorted(names, key=lambda name: (int(name.split()[0]), name))
    ]
    return markdown(("attack", *(f"`{name}`" for name in means)), rows)


def _shorten(means: str) -> str:
    return means.replace("the sandbox is gone ", "") or "not there, or refused"

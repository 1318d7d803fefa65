"""Habits of the package that ruff cannot see."""

import re
from collections.abc import Iterator

from tests.support.package_sources import sources

BROAD_EXCEPT = re.compile(r"^\s*except\b(?:.*\b(?:Base)?Exception\b|\*?\s*:)")


def broad_excepts_without_a_reason(text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), 1):
        if BROAD_EXCEPT.match(line) and not re.search(r"# boundary: \w+", line):
            yield number


UNPICKLES = re.compile(
    r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\btorch\.load\((?!.*weights_only=True)",
    re.MULTILINE,
)


def test_a_broad_except_says_why() -> None:
    found = [
        (module, line)
        for module, text in sources().items()
        for line in broad_excepts_without_a_reason(text)
    ]
    assert found == []


def test_nothing_is_unpickled() -> None:
    """But agents that a script handed over, from the run's own directory, and calls.

    A worker process takes these from the process that started it, and answers with JSON.
    """
    found = [module for module, text in sources().items() if UNPICKLES.search(text)]
    assert found == ["rollout/execution/agent_pickle.py", "rollout/execution/process_pool.py"]


def test_no_archive_is_extracted_by_tarfile() -> None:
    """Nor by another module of the library: one writer unpacks, and none of its files leave."""
    extracts = re.compile(r"\.extract(?:all)?\(|\bunpack_archive\(|[\"'](?:tar|unzip)[\"'],")
    found = [module for module, text in sources().items() if extracts.search(text)]
    assert found == []

"""Habits of the package that ruff cannot see."""

import re
from collections.abc import Iterator

from tests.support.environments import CHECKOUT
from tests.support.package_sources import PACKAGE, sources

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
    """But agents that a script handed over, from the run's own directory."""
    found = [module for module, text in sources().items() if UNPICKLES.search(text)]
    assert found == ["rollout/execution/agent_pickle.py"]


def test_no_archive_is_extracted_by_tarfile() -> None:
    """Nor by another module of the library: one writer unpacks, and none of its files leave."""
    extracts = re.compile(r"\.extract(?:all)?\(|\bunpack_archive\(|[\"'](?:tar|unzip)[\"'],")
    found = [module for module, text in sources().items() if extracts.search(text)]
    assert found == []


def test_an_entry_string_names_a_function_that_takes_a_configuration() -> None:
    source = "\n".join(sources().values())
    entries = sorted(set(re.findall(r'"areal_hpc\.([\w.]*):(\w+)"', source)))
    roles = {"inference", "jobs", "ledger", "proxy", "rollout", "trainer"}
    assert {module.split(".")[0] for module, _ in entries} == roles
    for module, function in entries:
        text = (PACKAGE / f"{module.replace('.', '/')}.py").read_text()
        takes_one = rf"^def {function}\(\w+: [^,\n]+(?:\[.+\])?\) ->"
        assert re.search(takes_one, text, re.MULTILINE), (module, function)


def test_tiers_share_nothing_but_their_support() -> None:
    for path in (CHECKOUT / "tests").rglob("*.py"):
        tier = path.relative_to(CHECKOUT / "tests").parts[0]
        shared = {tier, "support"} if tier == "support" else {tier, "support", "golden"}
        imported = re.findall(r"^\s*(?:from|import) tests\.(\w+)", path.read_text(), re.M)
        assert shared.issuperset(imported), path

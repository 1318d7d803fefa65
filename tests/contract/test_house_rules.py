"""Habits that ruff cannot see, of package and tests; every rule is shown to find an offense."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.environments import CHECKOUT
from tests.support.package_sources import PACKAGE, sources

Rule = Callable[[str], Iterator[int]]
"""Text of a module -> lines that offend."""


def broad_excepts_say_why(text: str) -> Iterator[int]:
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = map(ast.unparse, ast.walk(node.type)) if node.type else ["Exception"]
            is_broad = not {"Exception", "BaseException"}.isdisjoint(caught)
            if is_broad and not re.search(r"# boundary: \w+", lines[node.lineno - 1]):
                yield node.lineno


def nothing_is_unpickled(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
                yield node.lineno
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "torch.load"
            and "weights_only=True" not in map(ast.unparse, node.keywords)
        ):
            yield node.lineno


OFFENSES: list[tuple[Rule, str]] = [
    (broad_excepts_say_why, "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
    (broad_excepts_say_why, "try:\n    f()\nexcept:\n    pass"),
    (nothing_is_unpickled, "torch.load(path, map_location='cpu')"),
    (nothing_is_unpickled, "import cloudpickle"),
]
ALLOWED: dict[Rule, list[str]] = {
    broad_excepts_say_why: [],
    # The one place that unpickles: agents that a script handed over, from the run's own directory.
    nothing_is_unpickled: ["rollout/execution/agent_pickle.py"],
}
"""The module of each offense we live with. It may only shrink: what is mended must be taken out."""


@pytest.mark.parametrize("rule", ALLOWED)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    found = [(module, line) for module, text in sources().items() for line in rule(text)]
    assert [module for module, _ in found] == ALLOWED[rule], found


@pytest.mark.parametrize(("rule", "offense"), OFFENSES)
def test_the_rule_finds_its_offense(rule: Rule, offense: str) -> None:
    assert list(rule(offense))


def test_a_broad_except_with_a_reason_is_allowed() -> None:
    text = "try:\n    f()\nexcept Exception as error:  # boundary: user code\n    note(error)"
    assert not list(broad_excepts_say_why(text))


ENTRIES = sorted(set(re.findall(r'"(areal_hpc[\w.]*:\w+)"', "\n".join(sources().values()))))


def test_the_plan_names_entries_of_every_role() -> None:
    roles = {"inference", "jobs", "ledger", "proxy", "rollout", "trainer"}
    assert {entry.split(".")[1] for entry in ENTRIES} == roles


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_string_names_a_function_that_takes_a_configuration(entry: str) -> None:
    module, _, function = entry.partition(":")
    path = PACKAGE.parent / (module.replace(".", "/") + ".py")
    found = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert [len(node.args.args) for node in found] == [1]


def imports_of_other_tiers(name: str, text: str) -> list[str]:
    """What a file of tests, `tests/<tier>/...`, imports of other tiers."""
    tier = Path(name).parts[1]
    shared = {tier, "support"} if tier == "support" else {tier, "support", "golden"}
    found = re.findall(r"^\s*(?:from|import) (tests\.(\w+)[\w.]*)", text, re.M)
    return [module for module, other in found if other not in shared]


def test_tiers_share_nothing_but_their_support() -> None:
    names = [str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "tests").rglob("*.py")]
    found = {name: imports_of_other_tiers(name, (CHECKOUT / name).read_text()) for name in names}
    assert {name: modules for name, modules in found.items() if modules} == {}


def test_an_import_of_another_tier_is_found() -> None:
    text = "from tests.support.chatml import CHATML\nfrom tests.unit.session import families\n"
    assert imports_of_other_tiers("tests/unit/test_a.py", text) == []
    assert imports_of_other_tiers("tests/gpu/test_a.py", text) == ["tests.unit.session"]

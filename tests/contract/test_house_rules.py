"""Habits that ruff cannot see, of package and tests; every rule is shown to find an offence."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.environments import CHECKOUT

PACKAGE = CHECKOUT / "areal_hpc"

ALLOWED: dict[str, frozenset[str]] = {
    # The one place that unpickles: agents that a script handed over, from the run's own directory.
    "nothing_is_unpickled": frozenset({"rollout/execution/agent_pickle.py:14"}),
}
"""Offences we live with, by rule. It may only shrink: one that is mended must be taken out."""


@dataclass(frozen=True)
class Module:
    """One source file of the package."""

    name: str
    """Path relative to the package."""
    text: str

    @property
    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(ast.parse(self.text, self.name))


Rule = Callable[[Module], Iterator[str]]


def broad_excepts_say_why(module: Module) -> Iterator[str]:
    lines = module.text.splitlines()
    for node in module.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = set() if node.type is None else {ast.unparse(part) for part in ast.walk(node.type)}
        if node.type is not None and not caught & {"Exception", "BaseException"}:
            continue
        if not re.search(r"# boundary: \w+", lines[node.lineno - 1]):
            yield f"{module.name}:{node.lineno}"


def nothing_is_unpickled(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = [getattr(node, "module", None)]
            names = {alias.name for alias in node.names} | set(origin)
            if names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
                yield f"{module.name}:{node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            kept_safe = any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
                for keyword in node.keywords
            )
            if not kept_safe:
                yield f"{module.name}:{node.lineno}"


RULES: list[tuple[Rule, Module]] = [
    (
        broad_excepts_say_why,
        Module("a.py", "try:\n    f()\nexcept (OSError, Exception):\n    pass"),
    ),
    (nothing_is_unpickled, Module("a.py", "torch.load(path, map_location='cpu')")),
    (nothing_is_unpickled, Module("a.py", "import cloudpickle")),
]


def modules() -> list[Module]:
    return [
        Module(str(path.relative_to(PACKAGE)), path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


@pytest.mark.parametrize("rule", dict(RULES), ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    found = {offence for module in modules() for offence in rule(module)}
    assert found == ALLOWED.get(rule.__name__, frozenset())


@pytest.mark.parametrize(("rule", "offender"), RULES, ids=lambda value: getattr(value, "name", ""))
def test_the_rule_finds_its_offence(rule: Rule, offender: Module) -> None:
    assert list(rule(offender))


def test_a_broad_except_with_a_reason_is_allowed() -> None:
    text = "try:\n    f()\nexcept Exception as error:  # boundary: user code\n    note(error)"
    assert not list(broad_excepts_say_why(Module("a.py", text)))


def entries() -> set[str]:
    """Every `areal_hpc.<module>:<function>` string in the package."""
    return {
        node.value
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"areal_hpc[\w.]*:\w+", node.value)
    }


def test_the_plan_names_entries_of_every_role() -> None:
    roles = {"inference", "ledger", "proxy", "rollout", "trainer"}
    assert {entry.split(".")[1] for entry in entries()} == roles


@pytest.mark.parametrize("entry", sorted(entries()))
def test_an_entry_string_names_a_function_that_takes_a_configuration(entry: str) -> None:
    module, _, function = entry.partition(":")
    path = PACKAGE.parent / (module.replace(".", "/") + ".py")
    assert path.is_file()
    found = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert [len(node.args.args) for node in found] == [1]


def imports_of_other_tiers(name: str, text: str) -> list[str]:
    """What a file of tests, `tests/<tier>/...`, imports of other tiers."""
    shared = {Path(name).parts[1], "golden", "support"}
    if Path(name).parts[1] == "support":
        shared.remove("golden")
    found = re.findall(r"^\s*(?:from|import) (tests\.(\w+)[\w.]*)", text, re.M)
    return [f"{name}: {module}" for module, tier in found if tier not in shared]


def test_tiers_share_nothing_but_their_support() -> None:
    found = [
        offence
        for path in sorted((CHECKOUT / "tests").rglob("*.py"))
        for offence in imports_of_other_tiers(str(path.relative_to(CHECKOUT)), path.read_text())
    ]
    assert found == []


def test_an_import_of_another_tier_is_found() -> None:
    text = "from tests.support.chatml import CHATML\nfrom tests.unit.session import families\n"
    assert imports_of_other_tiers("tests/unit/test_a.py", text) == []
    assert imports_of_other_tiers("tests/gpu/test_a.py", text) == [
        "tests/gpu/test_a.py: tests.unit.session"
    ]

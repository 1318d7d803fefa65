from __future__ import annotations

import importlib
import itertools
import pickle
from pathlib import Path

import pytest

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.rollout.agent import EXTRA_KWARGS, AgentWorkflow, load_agent

GOOD = """
class Solver:
    def __init__(self, depth=1):
        if depth < 0:
            raise ValueError("depth must not be negative")
        self.depth = depth

    async def run(self, data, **extra_kwargs):
        return 1.0

class Blocking:
    def run(self, data, **extra_kwargs):
        return 1.0

class Closed:
    async def run(self, data):
        return 1.0

class Named:
    async def run(self, data, base_url, api_key, **rest):
        return 1.0

class Idle:
    pass

solver = Solver(depth=4)
depth = 3
"""


class Derived(AgentWorkflow):
    async def run(self, data: dict[str, object], **extra_kwargs: object) -> float:
        return 1.0


class Unfinished(AgentWorkflow):
    pass


numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of a name of its own, so that no test sees another's modules."""
    name = f"agents_under_test_{next(numbers)}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "solver.py").write_text(GOOD)
    (folder / "needs.py").write_text("import a_package_nobody_has\n")
    (folder / "broken.py").write_text("def half(:\n")
    (folder / "quits.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def problem_of(dotted_path: str, **kwargs: object) -> Problem:
    with pytest.raises(RecipeError) as caught:
        load_agent(dotted_path, kwargs)
    assert caught.value.exit_code == 78
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems
    (problem,) = caught.value.problems
    assert problem.hint
    return problem


def test_agent_is_built_once_with_the_kwargs(package: str) -> None:
    assert vars(load_agent(f"{package}.solver.Solver", {"depth": 3})) == {"depth": 3}


def test_run_may_name_some_of_the_extra_kwargs(package: str) -> None:
    load_agent(f"{package}.solver.Named", {})


@pytest.mark.parametrize("path", ["", "Solver", ".Solver", "solver."])
def test_path_without_module_and_class_is_refused(path: str) -> None:
    problem = problem_of(path)
    assert problem.key == "rollout.workflow"


def test_missing_package_is_named(package: str) -> None:
    problem = problem_of("no_such_package_xyz.solver.Solver")
    assert "there is no module 'no_such_package_xyz'" in problem.message
    assert "folder that holds the package" in problem.hint


def test_missing_package_with_a_near_name_is_suggested(package: str) -> None:
    assert f"did you mean {package!r}" in problem_of(f"{package}x.solver.Solver").message


def test_missing_module_suggests_the_nearest_one(package: str) -> None:
    problem = problem_of(f"{package}.slover.Solver")
    assert f"there is no module '{package}.slover'" in problem.message
    assert "did you mean 'solver'" in problem.message


def test_missing_class_suggests_the_nearest_one_and_lists_all(package: str) -> None:
    problem = problem_of(f"{package}.solver.Slover")
    assert f"the module '{package}.solver' has no 'Slover'" in problem.message
    assert "did you mean 'Solver'" in problem.message
    assert "Solver, Blocking, Closed, Named, Idle" in problem.hint


def test_class_used_as_a_package_is_a_missing_module(package: str) -> None:
    assert "no module" in problem_of(f"{package}.solver.Solver.run").message


def test_missing_dependency_of_the_module_is_named_with_its_line(package: str) -> None:
    problem = problem_of(f"{package}.needs.Solver")
    assert "No module named 'a_package_nobody_has'" in problem.message
    assert "needs.py:1" in problem.message
    assert "agents environment" in problem.hint


@pytest.mark.parametrize(
    ("module", "said"), [("broken", "SyntaxError"), ("quits", "SystemExit: 3")]
)
def test_module_that_fails_to_import_is_reported(package: str, module: str, said: str) -> None:
    problem = problem_of(f"{package}.{module}.Solver")
    assert f"importing '{package}.{module}' failed: " in problem.message
    assert said in problem.message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("depth", "is a int, expected a class"),
        ("Idle", "has no method `run`"),
        ("Blocking", "not `async def`"),
        ("Closed", "cannot be called with `data` and the keywords base_url"),
    ],
)
def test_wrong_shape_says_how_the_class_must_look(package: str, name: str, said: str) -> None:
    problem = problem_of(f"{package}.solver.{name}")
    assert said in problem.message
    assert "async def run(self, data, **extra_kwargs)" in problem.hint


def test_an_agent_is_given_as_a_class_an_instance_or_the_path_of_either(package: str) -> None:
    module = importlib.import_module(f"{package}.solver")
    for given in (module.Solver, f"{package}.solver.Solver"):
        assert load_agent(given, {"depth": 2}).depth == 2  # type: ignore[attr-defined]
    for given in (module.solver, f"{package}.solver.solver"):
        assert load_agent(given, {}) is module.solver
        with pytest.raises(
            RecipeError, match=r"is already an instance; \{'depth': 2\} cannot be applied"
        ):
            load_agent(given, {"depth": 2})
    with pytest.raises(RecipeError, match=r"'builtins\.int' has no method `run`"):
        load_agent(int, {})


def test_an_agent_in_a_process_of_its_own_needs_no_keywords(package: str) -> None:
    load_agent(f"{package}.solver.Closed", {}, extra_kwargs=())
    assert "rollout.agent.mode=subproc" in problem_of(f"{package}.solver.Closed").hint


def test_unknown_kwarg_shows_the_constructor(package: str) -> None:
    problem = problem_of(f"{package}.solver.Solver", deepness=3)
    assert problem.key == "rollout.workflow_kwargs"
    assert "deepness" in problem.message
    assert "Solver(depth=1)" in problem.hint


def test_constructor_that_raises_is_reported_with_its_line(package: str) -> None:
    problem = problem_of(f"{package}.solver.Solver", depth=-1)
    assert "ValueError: depth must not be negative" in problem.message
    assert "solver.py:5" in problem.message


def test_quick_start_agent_fits_the_contract() -> None:
    agent = load_agent("examples.quickstart.agent.ArithmeticAgent", {"max_tokens": 8})
    assert vars(agent) == {"max_tokens": 8}
    assert "http_client" in EXTRA_KWARGS


def test_an_agent_may_be_derived_from_the_base() -> None:
    assert isinstance(load_agent(Derived, {}), Derived)
    with pytest.raises(RecipeError, match="cannot be built"):
        load_agent(Unfinished, {})

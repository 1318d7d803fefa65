"""Agents get the arguments that their class takes; their errors may show a fault of the node."""

import errno
import importlib
import importlib.util
import itertools
import json
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import AgentError, NodeResourceShortageError, Problem, RecipeError
from areal_hpc.rollout.agent import AgentWorkflow, load_agent
from areal_hpc.rollout.execution import agent_worker
from areal_hpc.rollout.execution.agent_errors import (
    build_agent_error,
    describe_errno_shortage,
    find_node_shortage,
)
from areal_hpc.rollout.execution.process_pool import decode_answer
from areal_hpc.sandbox.isolated_worker import WORKER_LOOP_FILE

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


RUN = r"async def run\(self, data, \*\*extra_kwargs\)"
numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a package with a unique name, so that no test sees another's modules."""
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


def assert_said(problem: Problem, pattern: str) -> None:
    assert re.search(pattern, f"{problem.message}\n{problem.hint}", re.S)


REFUSED = {
    **dict.fromkeys(["", "Solver", ".Solver", "my_agent:Solver"], "expected a dotted path"),
    "no_such_module.": "no module 'no_such_module'",
    "no_such_package.solver.Solver": "no module 'no_such_package'.*folder that holds the package",
    "PKGx.solver.Solver": "did you mean 'PKG'",
    "PKG.slover.Solver": "there is no module 'PKG.slover'; did you mean 'solver'",
    "PKG.solver.Slover": "'PKG.solver' has no 'Slover'; did you mean 'Solver'.*Solver, Blocking",
    "PKG.solver.Solver.run": "no module 'PKG.solver.Solver'",
    "PKG.needs.Solver": "'a_package_nobody_has'.*needs.py:1.*cluster.agents.python",
    "PKG.broken.Solver": "importing 'PKG.broken' raised SyntaxError",
    "PKG.quits.Solver": "importing 'PKG.quits' raised SystemExit: 3",
    "PKG.solver.depth": f"is a int, expected a class.*{RUN}",
    "PKG.solver.Idle": f"has no method `run`.*{RUN}",
    "PKG.solver.Blocking": f"not `async def`.*{RUN}",
    "PKG.solver.Closed": f"called with `data` and the keywords base_url.*{RUN}.*mode=subproc",
}
"""Path of an agent, and the message and hint of its refusal."""


@pytest.mark.parametrize(("path", "text"), REFUSED.items(), ids=REFUSED.keys())
def test_a_path_without_an_agent_is_refused_in_detail(package: str, path: str, text: str) -> None:
    problem = problem_of(path.replace("PKG", package))
    assert problem.key == "rollout.workflow"
    assert_said(problem, text.replace("PKG", package))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"deepness": 3}, "deepness.*Solver\\(depth=1\\)"),
        ({"depth": -1}, "ValueError: depth must not be negative.*solver.py:5"),
    ],
)
def test_arguments_of_no_class_are_named(package: str, kwargs: dict[str, int], text: str) -> None:
    problem = problem_of(f"{package}.solver.Solver", **kwargs)
    assert problem.key == "rollout.workflow_kwargs"
    assert_said(problem, text)


def test_values_of_arguments_which_may_be_secrets_are_not_told(package: str) -> None:
    for kwargs in ({"token": "sk-1"}, {"depth": "sk-1"}):
        problem = problem_of(f"{package}.solver.Solver", **kwargs)
        assert f"with the arguments {next(iter(kwargs))}" in problem.message
        assert "{'" not in problem.message


def test_an_agent_is_given_as_a_class_an_instance_or_the_path_of_either(package: str) -> None:
    module = importlib.import_module(f"{package}.solver")
    for agent in (module.Solver, f"{package}.solver.Solver"):
        assert load_agent(agent, {"depth": 2}).depth == 2  # type: ignore[attr-defined]
    for agent in (module.solver, f"{package}.solver.solver"):
        assert load_agent(agent, {}) is module.solver
        with pytest.raises(
            RecipeError, match=r"is already an instance; the arguments depth cannot be applied"
        ):
            load_agent(agent, {"depth": 2})
    with pytest.raises(RecipeError, match=r"'builtins\.int' has no method `run`"):
        load_agent(int, {})


def test_an_agent_may_be_derived_from_the_base() -> None:
    assert isinstance(load_agent(Derived, {}), Derived)
    with pytest.raises(RecipeError, match="cannot be built"):
        load_agent(Unfinished, {})


def load_gyms_worker_loop() -> Any:
    spec = importlib.util.spec_from_file_location("worker_loop", WORKER_LOOP_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def chain(*errors: BaseException) -> BaseException:
    """Return the first error, caused by the second, and so on."""
    for error, cause in pairwise(errors):
        error.__cause__ = cause
    return errors[0]


def make_own_cause(error: BaseException) -> BaseException:
    """Make an error its own cause, as `raise error from error` does."""
    return chain(error, error)


REFUSED_ERRORS = ConnectionRefusedError(errno.ECONNREFUSED, "refused")


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (chain(ValueError("no tool"), OSError(errno.EMFILE, "no descriptor")), True),
        (chain(REFUSED_ERRORS, OSError(errno.EMFILE, "no descriptor")), True),
        (chain(ValueError("no tool"), RuntimeError(agent_worker.NO_THREAD_TEXT)), True),
        (RuntimeError("another"), False),
        (ExceptionGroup("two", [OSError(errno.EMFILE, "no descriptor"), KeyError("x")]), True),
        (make_own_cause(ValueError("no tool")), False),
        (chain(KeyError("x"), make_own_cause(OSError(errno.EMFILE, "no descriptor"))), True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), False),
        (OSError("without a number"), False),
    ],
)
def test_what_a_node_lacks_is_found_in_every_agent(error: BaseException, is_short: bool) -> None:
    assert (find_node_shortage(error) is not None) is is_short
    for worker in (agent_worker, load_gyms_worker_loop()):
        assert bool(describe_errno_shortage(worker.list_errnos(error))) is is_short
    answer = json.dumps({"raised": agent_worker.encode_raised_error(error)}).encode()
    with pytest.raises(
        NodeResourceShortageError if is_short else AgentError, match="the agent raised"
    ):
        decode_answer(answer)


def build_error_with_note() -> Exception:
    error = ValueError("no tool")
    error.add_note("see the manual")
    return error


NO_MESSAGE = "<exception str() failed>"


class WithoutMessageError(RuntimeError):
    def __str__(self) -> str:
        message: Any = None
        return str.__str__(message)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ValueError("1 error\nplace\n  Field required"),
            "ValueError: 1 error place Field required",
        ),
        (build_error_with_note(), "ValueError: no tool"),
        (SyntaxError("bad", ("a.py", 3, 1, "a b\n")), "SyntaxError: bad"),
        (chain(ValueError("no\ntool"), KeyError("x")), "ValueError: no tool ('x')"),
        (chain(ValueError("no"), WithoutMessageError()), f"ValueError: no ({NO_MESSAGE})"),
    ],
)
def test_an_exception_is_told_with_all_lines_of_its_message(error: Exception, text: str) -> None:
    assert build_agent_error(error, None).problems[0].message == f"the agent raised {text}"
    assert agent_worker.describe_error(error) == text.partition(" (")[0]
    assert find_node_shortage(error) is None
    assert agent_worker.list_errnos(error) == []

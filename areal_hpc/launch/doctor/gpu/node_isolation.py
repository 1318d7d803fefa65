"""Isolation of what models write and ask for: tried on this node, and judged."""

from collections.abc import Callable
from typing import Any

from areal_hpc.errors import ArealError
from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.gpu.report import IsolationFacts
from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts
from areal_hpc.sandbox.process import run_program


def try_isolation(agent: dict[str, Any] | None) -> tuple[IsolationFacts, ...]:
    """What comes of an empty program, and of a sandbox of a section `rollout.agent`, if given."""
    found = (_try_start(lambda: run_program(""), is_of_agents=False),)
    if agent is None:
        return found
    return (*found, _try_start(lambda: check_sandbox_starts(agent), is_of_agents=True))


def _try_start(start: Callable[[], object], *, is_of_agents: bool) -> IsolationFacts:
    try:
        start()
    except ArealError as error:
        problem = error.problems[0]
        return IsolationFacts(is_of_agents, problem.message, problem.hint)
    return IsolationFacts(is_of_agents)


def judge_isolation(facts: IsolationFacts) -> CheckResult:
    """A recipe that gives agents sandboxes needs them; which agent judges programs is not known."""
    name = "isolation"
    if facts.is_of_agents:
        if facts.problem:
            return fail(name, facts.problem, facts.hint)
        return ok(name, "a sandbox of the recipe's agents starts")
    if facts.problem:
        return warn(name, f"{facts.problem} (only code_reward needs it)", facts.hint)
    return ok(name, "programs of the model run in namespaces of their own here")

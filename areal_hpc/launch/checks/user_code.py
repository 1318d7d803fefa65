"""Check of the user's code: it is imported, and agents are built, in the Python of who will."""

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_hpc.errors import Problem
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.reward import ISOLATION_VARIABLE

USER_CODE_TIMEOUT_S = 120
"""User code that takes longer to import and build would also hold up every driver."""

_LOAD_USER_CODE_SCRIPT = """
import json, sys
from areal_hpc.errors import ArealError
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.agent import EXTRA_KWARG_NAMES, load_agent
request = json.load(sys.stdin)
sys.path[:0] = request["sys_path"]
try:
    for dotted, kwargs in request["agents"]:
        load_agent(dotted, kwargs, EXTRA_KWARG_NAMES if request["mode"] == "inline" else ())
    for key, dotted in request["functions"].items():
        load_user_function(dotted, key)
    if request["sandbox"]:
        from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox
        check_sandbox(request["sandbox"])
    if "areal_hpc.sandbox.run" in sys.modules:  # such as for `code_reward`
        sys.modules["areal_hpc.sandbox.run"].check_isolation()
except ArealError as error:
    problem = error.problems[0]
    print(json.dumps([problem.message, problem.key or "rollout.workflow", problem.hint]))
    sys.exit(error.exit_code)
"""


def check_user_code(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> Iterator[Problem]:
    """Import the user's code and build agents in the environment of who will: driver, ledger."""
    rollout, evaluation = recipe.rollout, recipe.evaluation
    agents = [
        (rollout.workflow, rollout.workflow_kwargs),
        (evaluation.workflow, evaluation.workflow_kwargs),
    ]
    agents += [
        (one.workflow, one.workflow_kwargs)
        for one in recipe.evaluation_sets
        if one.workflow_key != "evaluation"
    ]
    environ = {**os.environ, ISOLATION_VARIABLE: recipe.reward.isolation}
    asked: dict[str, Any] = {"sys_path": sys_path, "mode": rollout.agent.mode}
    for python, named, name, key, what in (
        (pythons["agents"], agents, "should_accept", "rollout.workflow", "the agent"),
        (pythons["train"], [], "curriculum", "rollout.curriculum", "the curriculum"),
    ):
        function = getattr(rollout, name)
        asked["agents"] = [one for one in named if one[0]]
        is_agent = bool(asked["agents"])
        asked["sandbox"] = (
            rollout.agent.model_dump() if is_agent and rollout.agent.isolation else None
        )
        asked["functions"] = {f"rollout.{name}": function} if function else {}
        if (asked["agents"] or asked["functions"]) and Path(python).exists():
            yield from _check_user_code_loads(python, asked, environ, key, what)


def _check_user_code_loads(
    python: str, request: Mapping[str, Any], environ: Mapping[str, str], key: str, what: str
) -> Iterator[Problem]:
    """Run the program that imports user code; it prints what is wrong as its last line."""
    try:
        answer = subprocess.run(
            [python, "-c", _LOAD_USER_CODE_SCRIPT],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=USER_CODE_TIMEOUT_S,
            check=False,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        message = f"{what} did not finish loading within {USER_CODE_TIMEOUT_S} s"
        yield Problem(message, key, "move slow work out of module imports and constructors")
        return
    if answer.returncode == 0:
        return
    try:
        message, key, hint = json.loads(answer.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        message, hint = f"{what} cannot be loaded: {last}", ""
    yield Problem(message, key, hint)

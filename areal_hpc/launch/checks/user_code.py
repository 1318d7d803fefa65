"""Check of the user's code: it is imported, and agents are built, in the Python of who will."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from areal_hpc.errors import ArealError, Problem
from areal_hpc.jobs.processes.line_process import LineProcess
from areal_hpc.launch.role_python import RolePythonError, ask_role
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.reward import ISOLATION_VARIABLE

USER_CODE_TIMEOUT_S = 120
"""User code that takes longer to import and build would also hold up every driver."""

MAX_ANSWER_BYTES = 1 << 20
AGENT_WORKER_FILE = Path(__file__).parents[2] / "rollout" / "execution" / "agent_worker.py"
"""The program that runs agents of `rollout.agent.python`."""

_LOAD_USER_CODE_SCRIPT = """
import json, os, sys
from areal_hpc.errors import ArealError
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.agent import EXTRA_KWARG_NAMES, load_agent
request = json.load(sys.stdin)
sys.path[:0] = request["sys_path"]
environ = dict(os.environ)
try:
    if request["mode"] == "subproc":
        from areal_hpc.rollout.execution.process_pool import select_driver_python_variables
        os.environ.clear()
        os.environ.update(select_driver_python_variables(environ, request["variables"]))
    for dotted, kwargs in request["agents"]:
        names = EXTRA_KWARG_NAMES if request["mode"] == "inline" else ()
        agent = load_agent(dotted, kwargs, names)
        if hasattr(agent, "check_isolation"):
            agent.check_isolation((request["sandbox"] or {}).get("isolation"))
    os.environ.update(environ)
    for key, dotted in request["functions"].items():
        load_user_function(dotted, key)
    if request["objective"]:
        from areal_hpc.recipe.sections.trainer import ObjectiveConfig
        from areal_hpc.trainer.objective.custom_loss import load_custom_loss
        load_custom_loss(ObjectiveConfig(**request["objective"]))
    if request["sandbox"]:
        from areal_hpc.rollout.execution.agent_sandboxes import check_sandbox_starts
        check_sandbox_starts(request["sandbox"])
    if "areal_hpc.sandbox.program" in sys.modules:  # such as for `code_reward`, or a gym
        from areal_hpc.sandbox.program import check_programs_run
        check_programs_run()
    answer = None
except ArealError as error:
    problem = error.problems[0]
    answer = [problem.message, problem.key or "rollout.workflow", problem.hint]
print()
print(json.dumps(answer), flush=True)
os._exit(0)  # what the code has registered for its end may print or wait
"""


def find_user_code_problems(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> Iterator[Problem]:
    """Import the user's code, and try it, in the environment of who will: driver, ledger, trainer.

    Agents are built, and a custom loss is computed of made-up tokens.
    """
    rollout, evaluation, objective = recipe.rollout, recipe.evaluation, recipe.trainer.objective
    agents = [
        (rollout.workflow, rollout.workflow_kwargs),
        (evaluation.workflow, evaluation.workflow_kwargs),
    ]
    agents += [
        (one.workflow, one.workflow_kwargs)
        for one in recipe.evaluation_sets
        if one.agent_section_key != "evaluation"
    ]
    if other := rollout.agent.python:
        for workflow, kwargs in filter(lambda one: one[0], agents):
            yield from _find_other_python_agent_problems(other, workflow, kwargs, sys_path)
        agents = []
    environ = {**os.environ, ISOLATION_VARIABLE: recipe.reward.isolation}
    request: dict[str, Any] = {"sys_path": sys_path, "mode": rollout.agent.mode, "objective": None}
    request["variables"] = rollout.agent.variables
    for python, named, name, key, what in (
        (pythons["agents"], agents, "should_accept", "rollout.workflow", "the agent"),
        (pythons["train"], [], "curriculum", "rollout.curriculum", "the curriculum"),
    ):
        function = getattr(rollout, name)
        request["agents"] = [one for one in named if one[0]]
        is_agent = bool(request["agents"])
        request["sandbox"] = (
            rollout.agent.model_dump() if is_agent and rollout.agent.isolation else None
        )
        request["functions"] = {f"rollout.{name}": function} if function else {}
        if is_agent and ":" in rollout.agent.auxiliary:
            request["functions"]["rollout.agent.auxiliary"] = rollout.agent.auxiliary
        if (request["agents"] or request["functions"]) and shutil.which(python):
            yield from _find_user_code_load_problems(python, request, environ, key, what)
    if objective.custom and shutil.which(pythons["train"]):
        loss_request = {**request, "agents": [], "functions": {}, "sandbox": None}
        loss_request["objective"] = objective.model_dump()
        yield from _find_user_code_load_problems(
            pythons["train"], loss_request, environ, "trainer.objective.custom", "the custom loss"
        )


def _find_other_python_agent_problems(
    python: str, workflow: str, kwargs: Mapping[str, Any], sys_path: tuple[str, ...]
) -> Iterator[Problem]:
    names = {"workflow": workflow, "kwargs": dict(kwargs), "sys_path": [*sys_path]}
    command = {"args": [python, str(AGENT_WORKER_FILE)], "stderr": subprocess.DEVNULL}
    try:
        with closing(LineProcess(command, "its process", MAX_ANSWER_BYTES)) as process:
            request = json.dumps({"do": "build", **names}).encode()
            answer = json.loads(process.ask_blocking(request, USER_CODE_TIMEOUT_S))
    except (OSError, ArealError, ValueError) as error:
        yield Problem(
            f"the agent cannot be built by {python}: {error}",
            "rollout.agent.python",
            "name a Python 3.10 or newer, and move slow work out of imports and constructors",
        )
        return
    if "raised" in answer:
        yield Problem(*answer["raised"]["problems"][0])


def _find_user_code_load_problems(
    python: str,
    request: Mapping[str, Any],
    environ: Mapping[str, str],
    key: str,
    code_description: str,
) -> Iterator[Problem]:
    program = ("-c", _LOAD_USER_CODE_SCRIPT)
    try:
        problem = ask_role(
            python, *program, request=request, environ=environ, timeout_s=USER_CODE_TIMEOUT_S
        )
    except RolePythonError as error:
        if error.is_late:
            message = f"{code_description} did not finish loading within {USER_CODE_TIMEOUT_S} s"
            yield Problem(message, key, "move slow work out of module imports and constructors")
        else:
            yield Problem(f"{code_description} cannot be loaded: {error}", key)
    else:
        if problem is not None:
            yield Problem(*problem)

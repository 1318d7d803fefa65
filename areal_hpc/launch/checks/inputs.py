"""Checks of a recipe's files, models, interpreters, SGLang options and user code.

Start with `find_input_problems`, which runs them all.
"""

import ast
import contextlib
import difflib
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.dataset.sources import list_source_paths
from areal_hpc.errors import ArealError, Problem, RecipeError
from areal_hpc.jobs.processes.line_workers import LineProcess
from areal_hpc.launch.checks.model import find_model_problems
from areal_hpc.launch.checks.role_python import (
    RolePythonError,
    ask_role,
    describe_python,
    find_role_python_problems,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.wire.decoding import convert_value

log = logging.getLogger(__name__)

EXTRA_ARGS_KEY = "inference.extra_args"
OPTION_CHECK_MODULE = "areal_hpc.inference.option_check"
OPTION_CHECK_TIMEOUT_S = 600.0
"""SGLang takes 4 to 11 s to import, minutes from cold storage or on a busy node."""
_PARSER_TABLES = {
    "tool_call_parser": ("srt/function_call/function_call_parser.py", "ToolCallParserEnum"),
    "reasoning_parser": ("srt/parser/reasoning_parser.py", "DetectorMap"),
}
"""File below sglang/ and name of its table, by key of `inference`, as in SGLang 0.5.23."""


class CommandReading(msgspec.Struct):
    unknown: list[str]
    """Unknown words, including the values of unknown options."""
    complaint: str
    """Error of the parser; empty if it could read the command line."""


class OptionReport(msgspec.Struct):
    known: list[str]
    readings: list[CommandReading]


def read_sglang_options(python: str, lines: Sequence[Sequence[str]]) -> OptionReport | None:
    """Let SGLang parse command lines; None if it cannot be imported on this machine."""
    checkout = str(Path(__file__).resolve().parents[3])
    environ = {**os.environ, "PYTHONPATH": checkout, "SGLANG_USE_CPU_ENGINE": "1"}
    program = ("-m", OPTION_CHECK_MODULE)
    try:
        answer = ask_role(
            python, *program, request=lines, environ=environ, timeout_s=OPTION_CHECK_TIMEOUT_S
        )
    except RolePythonError as error:
        log.info("SGLang's options cannot be read: %s", error)
        return None
    return convert_value(answer, OptionReport)


def find_extra_args_problems(recipe: Recipe, python: str) -> Iterator[Problem]:
    """Find problems of `inference.extra_args`; importing SGLang for them takes seconds."""
    arguments = recipe.inference.extra_args
    if not arguments:
        return
    report = read_sglang_options(python, [["--model-path", "model", *arguments]])
    if report is not None:
        yield from find_option_problems(arguments, report.readings[0], report.known)


def find_option_problems(
    arguments: Sequence[str], reading: CommandReading, known_options: Sequence[str]
) -> Iterator[Problem]:
    """Find problems in SGLang's reading of options. Pure."""
    two_entries = "write an option and its value as two entries of the list"
    if reading.complaint:
        message = f"SGLang cannot read {' '.join(arguments)!r}: {reading.complaint}"
        yield Problem(message, EXTRA_ARGS_KEY, two_entries)
    options = [word.partition("=")[0] for word in reading.unknown if word.startswith("-")]
    for option in options:
        similar = difflib.get_close_matches(option, known_options, n=1)
        hint = f"did you mean {similar[0]}?" if similar else "leave it out"
        yield Problem(f"SGLang has no option {option}", EXTRA_ARGS_KEY, hint)
    if reading.unknown and not options:
        message = f"SGLang expects an option, got {reading.unknown[0]!r}"
        yield Problem(message, EXTRA_ARGS_KEY, two_entries)


def find_parser_name_problems(inference: InferenceConfig, python: str) -> Iterator[Problem]:
    """Find parsers that an interpreter's SGLang lacks; none if it has no SGLang.

    The names are read from SGLang's source, because importing it takes seconds.
    """
    parsers = {key: name for key in _PARSER_TABLES if (name := getattr(inference, key))}
    if not parsers:
        return
    try:
        origin = describe_python(python, ["sglang"]).modules["sglang"]
    except (RolePythonError, KeyError):
        return
    for key, name in parsers.items():
        file, table = _PARSER_TABLES[key]
        known = _read_keys(Path(origin).parent / file, table)
        if known and name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"choose from {', '.join(known)}"
            yield Problem(f"SGLang has no parser {name!r}", f"inference.{key}", hint)


def _read_keys(source: Path, table: str) -> list[str]:
    try:
        tree = ast.parse(source.read_text())
    except (OSError, SyntaxError):
        return []
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys)) if (
                name == table
            ):
                return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
    return []


USER_CODE_TIMEOUT_S = 120
"""Time to import and build user code. Slower code would also delay every driver."""

MAX_ANSWER_BYTES = 1 << 20
AGENT_WORKER_FILE = Path(__file__).parents[2] / "rollout" / "execution" / "agent_worker.py"
"""Program that runs agents of `rollout.agent.python`."""

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
        from areal_hpc.recipe.sections.objective import ObjectiveConfig
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
    """Import and try the user's code in the Python of the process that will run it.

    Agents are built, and a custom loss is computed on made-up tokens.
    """
    rollout, objective, agents = recipe.rollout, recipe.trainer.objective, recipe.agents
    if agent_python := rollout.agent.python:
        for workflow, kwargs in agents:
            yield from _find_foreign_agent_problems(agent_python, workflow, kwargs, sys_path)
        agents = []
    environ = {**os.environ, ISOLATION_VARIABLE: recipe.reward.isolation}
    request: dict[str, Any] = {"sys_path": sys_path, "mode": rollout.agent.mode, "objective": None}
    request["variables"] = rollout.agent.variables
    for python, role_agents, name, key, code_description in (
        (pythons["agents"], agents, "should_accept", "rollout.workflow", "the agent"),
        (pythons["train"], [], "curriculum", "rollout.curriculum", "the curriculum"),
    ):
        function = getattr(rollout, name)
        request["agents"] = role_agents
        is_agent = bool(role_agents)
        request["sandbox"] = (
            rollout.agent.model_dump() if is_agent and rollout.agent.isolation else None
        )
        request["functions"] = {f"rollout.{name}": function} if function else {}
        if is_agent and ":" in rollout.agent.auxiliary:
            request["functions"]["rollout.agent.auxiliary"] = rollout.agent.auxiliary
        if (is_agent or request["functions"]) and shutil.which(python):
            yield from _find_loading_problems(python, request, environ, key, code_description)
    if objective.custom and shutil.which(pythons["train"]):
        loss_request = {**request, "agents": [], "functions": {}, "sandbox": None}
        loss_request["objective"] = objective.model_dump()
        yield from _find_loading_problems(
            pythons["train"], loss_request, environ, "trainer.objective.custom", "the custom loss"
        )


def _find_foreign_agent_problems(
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


def _find_loading_problems(
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


MIN_RUN_DIR_FREE_BYTES = 256 * 1024 * 1024


def find_input_problems(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> list[Problem]:
    """Find all problems of the files, interpreters and names in a recipe; leave no file behind."""
    problems = [
        *find_role_python_problems(recipe, pythons),
        *_find_run_directory_problems(recipe.run_dir),
        *find_model_problems(recipe),
    ]
    if shutil.which(pythons["serve"]):
        problems += find_parser_name_problems(recipe.inference, pythons["serve"])
        problems += find_extra_args_problems(recipe, pythons["serve"])
    for part, key in recipe.task_sets_with_keys:
        try:
            list_source_paths(part, key)
        except RecipeError as error:
            problems += error.problems
    return [*problems, *find_user_code_problems(recipe, pythons, sys_path)]


def _find_run_directory_problems(run_dir: Path) -> Iterator[Problem]:
    new_folders = find_missing_folders(run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
        free_bytes = shutil.disk_usage(run_dir).free
    except OSError as error:
        yield Problem(
            f"the run directory cannot be written: {error.strerror}: {run_dir}",
            "cluster.fileroot",
            "choose shared storage that you may write to, with cluster.fileroot=/path",
        )
        return
    finally:
        remove_empty_folders(new_folders)
    if free_bytes < MIN_RUN_DIR_FREE_BYTES:
        yield Problem(
            f"the run directory's file system is full: {free_bytes // 2**20} MiB free, "
            f"at least {MIN_RUN_DIR_FREE_BYTES // 2**20} MiB needed: {run_dir}",
            "cluster.fileroot",
            "free some space, or choose another place with cluster.fileroot=/path",
        )


def find_missing_folders(path: Path) -> list[Path]:
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def remove_empty_folders(folders: Iterable[Path]) -> None:
    with contextlib.suppress(OSError):
        for folder in folders:
            folder.rmdir()

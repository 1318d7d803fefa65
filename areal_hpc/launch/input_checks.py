"""Checks of what a recipe refers to: files, models, interpreters, user code."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_hpc.dataset.sources import list_source_files
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.tiny_model import build_tiny_config
from areal_hpc.recipe.hub_cache import find_snapshot
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.trainer.model.families.architecture import find_layout_problems, parse_architecture

MIN_FREE_BYTES = 256 * 1024 * 1024
"""Free space below which a run directory counts as full."""

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
except ArealError as error:
    problem = error.problems[0]
    print(json.dumps([problem.message, problem.key or "rollout.workflow", problem.hint]))
    sys.exit(error.exit_code)
"""


def check_inputs(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> list[Problem]:
    """All problems of the files, interpreters and names that a recipe mentions."""
    problems = [
        Problem(
            f"no Python interpreter for role {role} at {python}",
            f"cluster.{role}.python",
            "run make setup, or set this key to the interpreter of the role",
        )
        for role, python in pythons.items()
        if not (Path(python).exists() or shutil.which(python))
    ]
    problems += [*_check_run_directory(recipe.run_dir), *_check_model(recipe)]
    if (tiny := recipe.model.tiny) is not None:
        problems += _check_parallel_sizes(build_tiny_config(tiny), "model.tiny", recipe)
    for part, key in recipe.task_sets_with_keys:
        try:
            list_source_files(part, key)
        except RecipeError as error:
            problems += error.problems
    return [*problems, *_check_user_code(recipe, pythons, sys_path)]


def _check_run_directory(run_dir: Path) -> Iterator[Problem]:
    """Can it be made, written to, and does it have room?"""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe.{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        yield Problem(
            f"the run directory cannot be written: {error.strerror}: {run_dir}",
            "cluster.fileroot",
            "choose shared storage that you may write to, with cluster.fileroot=/path",
        )
        return
    free_bytes = shutil.disk_usage(run_dir).free
    if free_bytes < MIN_FREE_BYTES:
        yield Problem(
            f"the run directory's file system is full: {free_bytes // 2**20} MiB free, "
            f"at least {MIN_FREE_BYTES // 2**20} MiB needed: {run_dir}",
            "cluster.fileroot",
            "free some space, or choose another place with cluster.fileroot=/path",
        )


def _check_model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.path is not None:
        yield from _check_model_directory(model.path, "model.path", recipe)
    if model.hub is not None:
        try:
            folder = find_snapshot(model.hub, "model", model.revision, "model.hub")
        except RecipeError as error:
            yield from error.problems
        else:
            yield from _check_model_directory(folder, "model.hub", recipe)


def _check_model_directory(path: Path, key: str, recipe: Recipe) -> Iterator[Problem]:
    if not path.is_dir():
        yield Problem(
            f"there is no model directory at {path.resolve()}",
            key,
            "give a directory in Hugging Face format; jobs never download",
        )
        return
    for name, what in (
        ("config.json", "the model's shape"),
        ("tokenizer.json", "the tokenizer"),
        ("tokenizer_config.json", "the tokenizer's settings and chat template"),
    ):
        if not (path / name).is_file():
            yield Problem(
                f"{path} has no {name} ({what})",
                key,
                "copy the tokenizer files of the base model into the directory"
                if "tokenizer" in name
                else "give a directory in Hugging Face format",
            )
    if not list(path.glob("*.safetensors")):
        yield Problem(f"{path} has no *.safetensors weights", key)
    if (path / "config.json").is_file():
        where = path / "config.json"
        yield from _check_parallel_sizes(json.loads(where.read_bytes()), str(where), recipe)


def _check_parallel_sizes(
    config: Mapping[str, Any], where: str, recipe: Recipe
) -> Iterator[Problem]:
    """Is it a network that can be trained, and does it split as the recipe asks?"""
    try:
        arch = parse_architecture(config, where)
    except RecipeError as error:
        yield from error.problems
        return
    yield from find_layout_problems(arch, recipe.trainer.parallel)
    if arch.heads % recipe.inference.tp:
        yield Problem(
            f"num_attention_heads {arch.heads} must be a multiple of tp {recipe.inference.tp}",
            "inference.tp",
            f"use a divisor of {arch.heads}",
        )


def _check_user_code(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> Iterator[Problem]:
    """Import the user's code and build agents in the environment of who will: driver, ledger."""
    rollout, evaluation = recipe.rollout, recipe.evaluation
    agents = [
        (rollout.workflow, rollout.workflow_kwargs),
        (evaluation.workflow, evaluation.workflow_kwargs),
    ]
    asked: dict[str, Any] = {"sys_path": sys_path, "mode": rollout.agent.mode}
    for python, named, name, key, what in (
        (pythons["agents"], agents, "should_accept", "rollout.workflow", "the agent"),
        (pythons["train"], [], "curriculum", "rollout.curriculum", "the curriculum"),
    ):
        function = getattr(rollout, name)
        asked["agents"] = [one for one in named if one[0]]
        asked["functions"] = {f"rollout.{name}": function} if function else {}
        if (asked["agents"] or asked["functions"]) and Path(python).exists():
            yield from _check_user_code_loads(python, asked, key, what)


def _check_user_code_loads(
    python: str, request: Mapping[str, Any], key: str, what: str
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

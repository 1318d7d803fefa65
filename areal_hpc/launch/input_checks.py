"""Checks of what a recipe refers to: files, models, interpreters, user code."""

from __future__ import annotations

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
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.trainer.model.families.architecture import find_layout_problems, parse_architecture

MIN_FREE_BYTES = 256 * 1024 * 1024
"""Free space below which a run directory counts as full."""

MAX_LOAD_S = 120
"""User code that takes longer to import and build would also hold up every driver."""

_LOAD_CURRICULUM = """
import json, sys
from areal_hpc.errors import ArealError
from areal_hpc.recipe.user_functions import load_user_function
request = json.load(sys.stdin)
sys.path[:0] = request["sys_path"]
try:
    load_user_function(request["curriculum"], "rollout.curriculum")
except ArealError as error:
    problem = error.problems[0]
    print(json.dumps([problem.message, problem.key, problem.hint]))
    sys.exit(error.exit_code)
"""

_LOAD_AGENT = """
import json, sys
from areal_hpc.errors import ArealError
from areal_hpc.rollout.agent import EXTRA_KWARGS, load_agent
from areal_hpc.recipe.user_functions import load_user_function
request = json.load(sys.stdin)
sys.path[:0] = request["sys_path"]
try:
    extra_kwargs = EXTRA_KWARGS if request["mode"] == "inline" else ()
    if request["workflow"]:
        load_agent(request["workflow"], request["kwargs"], extra_kwargs)
    if request["evaluation_workflow"]:
        load_agent(request["evaluation_workflow"], request["evaluation_kwargs"], extra_kwargs)
    if request["should_accept"]:
        load_user_function(request["should_accept"], "rollout.should_accept")
except ArealError as error:
    problem = error.problems[0]
    print(json.dumps([problem.message, problem.key or "rollout.workflow", problem.hint]))
    sys.exit(error.exit_code)
"""


def check_inputs(
    recipe: Recipe, pythons: Mapping[str, str], sys_path: tuple[str, ...]
) -> list[Problem]:
    """Everything wrong with the files, interpreters and names that a recipe mentions."""
    problems = [*_interpreters(pythons), *_run_directory(recipe.run_dir)]
    problems += _model(recipe)
    if (tiny := recipe.model.tiny) is not None:
        problems += _layout_fits(build_tiny_config(**tiny.model_dump()), "model.tiny", recipe)
    for part, key in recipe.train_dataset.parts("train_dataset"):
        problems += _dataset(part, key)
    if recipe.valid_dataset is not None:
        problems += _dataset(recipe.valid_dataset, "valid_dataset")
    if recipe.sft is not None:
        problems += _dataset(recipe.sft.dataset, "sft.dataset")
    if Path(pythons["agents"]).exists():
        problems += _agent(recipe, pythons["agents"], sys_path)
    if Path(pythons["train"]).exists():
        problems += _curriculum(recipe, pythons["train"], sys_path)
    return problems


def _interpreters(pythons: Mapping[str, str]) -> Iterator[Problem]:
    for role, python in pythons.items():
        if not (Path(python).exists() or shutil.which(python)):
            yield Problem(
                f"no Python interpreter for role {role} at {python}",
                f"cluster.{role}.python",
                "run make setup, or set this key to the interpreter of the role",
            )


def _run_directory(run_dir: Path) -> Iterator[Problem]:
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


def _model(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.path is not None:
        yield from _model_directory(model.path, "model.path", recipe)
    if model.hub is not None:
        try:
            folder = find_snapshot(model.hub, "model", model.revision, "model.hub")
        except RecipeError as error:
            yield from error.problems
        else:
            yield from _model_directory(folder, "model.hub", recipe)


def _model_directory(path: Path, key: str, recipe: Recipe) -> Iterator[Problem]:
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
        yield from _layout_fits(json.loads(where.read_bytes()), str(where), recipe)


def _layout_fits(config: Mapping[str, Any], where: str, recipe: Recipe) -> Iterator[Problem]:
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


def _dataset(config: TaskSetConfig, key: str) -> Iterator[Problem]:
    try:
        list_source_files(config, key)
    except RecipeError as error:
        yield from error.problems


def _agent(recipe: Recipe, python: str, sys_path: tuple[str, ...]) -> Iterator[Problem]:
    """Import the user's code and build the agent in its own environment, as the driver will."""
    if not (recipe.rollout.workflow or recipe.rollout.should_accept):
        return
    request = {
        "workflow": recipe.rollout.workflow,
        "should_accept": recipe.rollout.should_accept,
        "kwargs": recipe.rollout.workflow_kwargs,
        "evaluation_workflow": recipe.evaluation.workflow,
        "evaluation_kwargs": recipe.evaluation.workflow_kwargs,
        "sys_path": sys_path,
        "mode": recipe.rollout.agent.mode,
    }
    yield from _loads(python, _LOAD_AGENT, request, "rollout.workflow", "the agent")


def _curriculum(recipe: Recipe, python: str, sys_path: tuple[str, ...]) -> Iterator[Problem]:
    """Import the user's function in the ledger's environment."""
    if recipe.rollout.curriculum:
        request = {"curriculum": recipe.rollout.curriculum, "sys_path": sys_path}
        yield from _loads(python, _LOAD_CURRICULUM, request, "rollout.curriculum", "the curriculum")


def _loads(
    python: str, program: str, request: Mapping[str, object], key: str, what: str
) -> Iterator[Problem]:
    """Run a program that imports the user's code; it prints what is wrong as its last line."""
    try:
        answer = subprocess.run(
            [python, "-c", program],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=MAX_LOAD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"{what} did not finish loading within {MAX_LOAD_S} s"
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

"""The recipes for GPUs, which nobody ran here: they parse, plan, fit, and name what exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.jobs.gpus import VisibleGpus
from areal_hpc.launch.devices import shortages
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.dataset import TaskSetConfig
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.agent import load_agent
from areal_hpc.trainer.model.families.architecture import find_layout_problems, read_architecture
from tests.support.environments import CHECKOUT

MODELS = CHECKOUT / "tests" / "samples" / "models"
COMMIT = "89abcdef" * 5
NODES = {
    "gsm8k_anthropic": 1,
    "gsm8k_camel": 1,
    "gsm8k_langchain": 1,
    "gsm8k_qwen2.5_1.5b": 1,
    "gsm8k_qwen3_0.6b": 1,
    "gsm8k_team": 1,
    "gsm8k_tools": 1,
    "hotpotqa_search": 1,
    "math_7b": 8,
    "online_chat": 1,
    "sorting": 1,
    "agentic_code_32b": 16,
}
NAMES = sorted(NODES)
FITS = """
import inspect, json, sys
from areal_hpc.areal.utils.dynamic_import import import_from_string
agent = import_from_string(sys.argv[1])
inspect.signature(agent).bind(**json.loads(sys.argv[2]))
assert inspect.iscoroutinefunction(agent.run)
"""
"""Run in the environment of an agent's framework. Building CAMEL's would need the tokenizer."""


def recipe_path(name: str) -> Path:
    return CHECKOUT / "recipes" / f"{name}.yaml"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache that holds the shapes of the recipes' models, not their weights."""
    root = tmp_path_factory.mktemp("cache")
    for model in MODELS.iterdir():
        repo = root / f"models--Qwen--{model.name}"
        shutil.copytree(model, repo / "snapshots" / COMMIT)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
    return root


def planned(name: str, cache: Path, *overrides: str, gpus: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "plan", str(recipe_path(name)), *overrides],
        cwd=CHECKOUT,
        env={**os.environ, "HF_HUB_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": gpus},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def datasets(recipe: Recipe) -> list[TaskSetConfig]:
    parts = [part for part, _ in recipe.train_dataset.parts("")]
    return parts + ([recipe.valid_dataset] if recipe.valid_dataset else [])


def test_every_recipe_that_was_not_run_is_looked_at_here() -> None:
    unrun = {
        p.stem for p in (CHECKOUT / "recipes").glob("*.yaml") if "not run here" in p.read_text()
    }
    assert unrun == set(NODES)


@pytest.mark.parametrize("name", NAMES)
def test_it_plans_and_its_model_fits(name: str, cache: Path) -> None:
    said = planned(name, cache)
    assert "warning" not in said
    assert "memory: unknown" not in said
    totals = [float(total) for total in re.findall(r"total +([\d.]+) of 80", said)]
    assert len(totals) == 2
    assert all(10 < total < 72 for total in totals), said


@pytest.mark.parametrize("name", NAMES)
def test_it_uses_every_gpu_of_its_nodes_and_splits_its_model(name: str) -> None:
    recipe = load_recipe(recipe_path(name))
    serving = recipe.inference.cells * recipe.inference.replicas_per_cell * recipe.inference.tp
    assert serving + recipe.trainer.parallel.world_size == 8 * NODES[name]
    assert recipe.model.hub is not None
    arch = read_architecture(MODELS / recipe.model.hub.removeprefix("Qwen/"))
    assert list(find_layout_problems(arch, recipe.trainer.parallel)) == []
    assert arch.heads % recipe.inference.tp == 0
    longest = recipe.inference.context_length
    assert longest is not None
    assert longest <= recipe.trainer.max_tokens_per_microbatch


@pytest.mark.parametrize("name", [name for name in NAMES if NODES[name] == 1])
def test_a_recipe_for_one_node_runs_on_a_machine_like_it_and_on_none_smaller(name: str) -> None:
    recipe = load_recipe(recipe_path(name))
    assert shortages(recipe, VisibleGpus(tuple("01234567"), "8")) == []
    (problem,) = shortages(recipe, VisibleGpus(tuple("0123456"), "7"))
    assert "it needs 8 at once" in problem.message


def test_the_plan_shares_the_gpus_of_this_machine_out(cache: Path) -> None:
    said = planned("gsm8k_qwen3_0.6b", cache, gpus="0,1,2,3,4,5,6,7")
    assert "GPUs with areal-hpc run on this machine: trainer: 0 | 1 | 2 | 3\n" in said
    assert "GPUs with areal-hpc run on this machine: cell-0: 4,5,6,7\n" in said
    said = planned("gsm8k_qwen3_0.6b", cache, gpus="0,1")
    assert "areal-hpc run refuses on this machine: too few GPUs for the stage train" in said


@pytest.mark.parametrize("name", NAMES)
def test_the_agent_and_the_functions_that_it_names_exist(name: str) -> None:
    recipe = load_recipe(recipe_path(name))
    workflow, kwargs = recipe.rollout.workflow, recipe.rollout.workflow_kwargs
    python = recipe.cluster.agents.python
    if python != "auto":
        subprocess.run(
            [CHECKOUT / python, "-c", FITS, workflow, json.dumps(kwargs)],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            check=True,
        )
    elif recipe.rollout.agent.mode != "online":
        load_agent(workflow, kwargs)  # raises for what is not there
    if recipe.rollout.should_accept:
        assert callable(load_user_function(recipe.rollout.should_accept, "should_accept"))
    for part in datasets(recipe):
        if part.generator:
            made = load_user_function(part.generator, "generator")(**part.kwargs)
            assert "messages" in next(iter(made))
        else:
            assert part.hub
            assert part.to_task
            assert callable(load_user_function(part.to_task, "to_task"))


def test_what_does_not_fit_is_warned_of(cache: Path) -> None:
    said = planned("agentic_code_32b", cache, "trainer.parallel={tp: 2, pp: 1, dp: 8}")
    assert "warning: a trainer rank of stage 0 takes" in said
    assert "at: trainer.parallel" in said


def test_without_the_model_the_plan_says_how_to_get_it(tmp_path: Path) -> None:
    said = planned("math_7b", tmp_path)
    assert "job trainer: 32 tasks" in said
    assert "memory: unknown" in said
    assert "areal-hpc prefetch" in said

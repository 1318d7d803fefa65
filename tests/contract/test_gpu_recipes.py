"""The recipes for GPUs, which nobody ran here, parse, plan, fit, and name existing things."""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from areal_hpc.cli.main import main
from areal_hpc.launch.job_places import find_gpu_problems
from areal_hpc.recipe.files import list_shipped_recipes, parse_header
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.user_functions import load_user_function
from areal_hpc.rollout.agent import load_agent
from areal_hpc.trainer.model.families.architecture import find_layout_problems, read_architecture
from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT

MODELS = CHECKOUT / "tests" / "samples" / "models"
COMMIT = "89abcdef" * 5
GSM8K = "gpu8_gsm8k_qwen3_0.6b"
GPUS_OF_ONE_NODE = {"gpu2_gsm8k_qwen3_4b_lora": 2}
"""Recipes whose node needs fewer than eight GPUs."""
NODES = {
    **dict.fromkeys(GPUS_OF_ONE_NODE, 1),
    "gpu128_code_qwen3_32b": 16,
    "gpu128_harbor_qwen3_32b": 16,
    "gpu16_code_qwen3_8b": 2,
    "gpu16_gsm8k_qwen3_30b_a3b": 2,
    "gpu64_math_qwen2.5_7b": 8,
    GSM8K: 1,
    "gpu8_online_qwen2.5_1.5b": 1,
    "gpu8_own_task_qwen2.5_1.5b": 1,
    "gpu8_search_qwen2.5_1.5b": 1,
    "gpu8_swe_qwen3.5_9b": 1,
    "variants/code_qwen3_32b_128k": 8,
    "variants/terminal_qwen3_32b": 16,
}
RECIPES = list_shipped_recipes()
GSM8K_VARIANTS = parse_header(RECIPES[GSM8K].read_text()).overrides_by_variant
CASES = [
    *(pytest.param(name, (), id=name) for name in NODES),
    *(pytest.param(GSM8K, words, id=variant) for variant, words in GSM8K_VARIANTS.items()),
]
"""Every recipe, and one with each of the lines that its header has for other agents."""
FITS = """
import inspect, json, sys
from areal_hpc.areal.helpers import import_from_string
for path, kwargs in json.loads(sys.argv[1]):
    agent = import_from_string(path)
    inspect.signature(agent).bind(**kwargs)
    assert inspect.iscoroutinefunction(agent.run), path
"""
"""Run in the environment of agents' framework. Building CAMEL's would need the tokenizer."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a hub cache with the shapes of the recipes' models, without their weights."""
    root = tmp_path_factory.mktemp("cache")
    for model in MODELS.iterdir():
        repo = root / f"models--Qwen--{model.name}"
        shutil.copytree(model, repo / "snapshots" / COMMIT)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(COMMIT)
    return root


@pytest.fixture
def plan(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return the output of `areal-hpc plan` for a recipe."""

    def ask(name: str, *overrides: str, gpus: str = "", cache: Path = cache) -> str:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        with pytest.raises(SystemExit) as end:
            main(["plan", str(RECIPES[name]), *overrides])
        assert end.value.code == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return ask


@pytest.mark.parametrize(("name", "overrides"), CASES)
def test_it_plans_fits_and_uses_every_gpu_of_its_nodes(
    name: str, overrides: tuple[str, ...], plan: Callable[..., str]
) -> None:
    text = plan(name, *overrides)
    assert "warning" not in text
    assert "memory: unknown" not in text
    totals = [float(total) for total in re.findall(r"total +([\d.]+) of 80", text)]
    assert len(totals) == 2
    assert all(10 < total < 72 for total in totals), text
    recipe = load_recipe(RECIPES[name], overrides)
    serving = recipe.inference.cells * recipe.inference.replicas_per_cell * recipe.inference.tp
    gpus = GPUS_OF_ONE_NODE.get(name, 8 * NODES[name])
    assert serving + recipe.trainer.parallel.world_size == gpus
    assert recipe.model.hub is not None
    model = MODELS / recipe.model.hub.removeprefix("Qwen/")
    arch = read_architecture(model, recipe.trainer.lora)
    assert list(find_layout_problems(arch, recipe.trainer.parallel)) == []
    assert arch.heads % recipe.inference.tp == 0
    assert recipe.inference.context_length is not None
    assert recipe.inference.context_length <= recipe.trainer.max_tokens_per_microbatch
    if NODES[name] == 1:
        visible_devices = ",".join(map(str, range(gpus)))
        assert find_gpu_problems(recipe, {"CUDA_VISIBLE_DEVICES": visible_devices}) == []
        (problem,) = find_gpu_problems(recipe, {"CUDA_VISIBLE_DEVICES": visible_devices[:-2]})
        assert f"it needs {gpus} at once" in problem.message


def test_the_plan_shares_the_gpus_of_this_machine_out(plan: Callable[..., str]) -> None:
    text = plan(GSM8K, gpus="0,1,2,3,4,5,6,7")
    assert "GPUs with areal-hpc run on this machine: trainer: 0 | 1 | 2 | 3\n" in text
    assert "GPUs with areal-hpc run on this machine: cell-0: 4,5,6,7\n" in text
    text = plan(GSM8K, gpus="0,1")
    assert "areal-hpc run refuses on this machine: too few GPUs for the stage train" in text


def test_the_agents_and_the_functions_that_they_name_exist() -> None:
    elsewhere: dict[str, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    recipes = [load_recipe(RECIPES[name]) for name in NODES]
    recipes += [load_recipe(RECIPES[GSM8K], words) for words in GSM8K_VARIANTS.values()]
    for recipe in recipes:
        rollout, python = recipe.rollout, recipe.cluster.agents.python
        if python != "auto":
            elsewhere[python].append((rollout.workflow, rollout.workflow_kwargs))
        elif rollout.agent.mode != "online":
            load_agent(rollout.workflow, rollout.workflow_kwargs)  # raises for a missing name
        if rollout.should_accept:
            load_user_function(rollout.should_accept, "should_accept")
        for part, key in recipe.task_sets_with_keys:
            if part.generator:
                tasks = load_user_function(part.generator, key)(**part.kwargs)
                assert "messages" in next(iter(tasks))
            elif part.path is None:
                assert part.hub
                assert part.to_task
                load_user_function(part.to_task, key)
    for python, agents in elsewhere.items():
        environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        said_by(run_program(CHECKOUT / python, "-c", FITS, json.dumps(agents), environ=environ))


def test_what_does_not_fit_or_is_missing_is_said(plan: Callable[..., str], tmp_path: Path) -> None:
    text = plan("gpu128_code_qwen3_32b", "trainer.parallel={tp: 2, pp: 1, dp: 8}")
    assert "warning: a trainer rank of stage 0 takes" in text
    assert "at: trainer.parallel" in text
    text = plan("gpu16_code_qwen3_8b", "trainer.recompute=none")
    assert "try: trainer.recompute=selective takes 77.4 GiB" in text
    text = plan("gpu16_code_qwen3_8b", "trainer.recompute=none", "trainer.parallel={tp: 1, dp: 8}")
    offload = "trainer.offload.optimizer=true trainer.offload.activations=true"
    assert f"try: trainer.recompute=full {offload} takes 74.3 GiB" in text
    uneven = "trainer.parallel={tp: 8, pp: 3, cp: 2, dp: 1}"
    text = plan("gpu128_code_qwen3_32b", uneven)
    assert "64 layers on 3 stages: 21 + 22 + 21" in text
    text = plan("gpu64_math_qwen2.5_7b", "model.hub=someone/unheard-of", cache=tmp_path)
    assert "memory: unknown" in text
    assert "areal-hpc prefetch" in text

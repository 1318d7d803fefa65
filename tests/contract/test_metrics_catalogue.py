"""The catalogue explains each metric, and `import areal_hpc` is complete and typed."""

import subprocess
import sys
from pathlib import Path
from typing import Any, assert_type

import pytest

import areal_hpc
from areal_hpc.areal import PPOTrainer
from areal_hpc.areal.api import AsyncRewardWrapper
from areal_hpc.launch.run import load_with_overrides
from areal_hpc.metrics.step_metrics import STEP_PHASES, find_metric, read_catalogue
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

NAMES = {metric.name for metric in read_catalogue()}


def test_each_says_what_it_is_and_every_phase_belongs_to_one_limit() -> None:
    for metric in read_catalogue():
        assert metric.meaning
    assert len(NAMES) == len(read_catalogue())
    phases = [f"time/{phase.name}_s" for phase in STEP_PHASES]
    assert sorted([*phases, "time/step_s"]) == sorted(n for n in NAMES if n.startswith("time/"))
    script = (CHECKOUT / "areal_hpc/view/dashboard/static/timeline.js").read_text()
    assert [phase.name for phase in STEP_PHASES if f" {phase.name}: " not in script] == [], "colors"
    assert find_metric("reward/part/format") is not None
    assert find_metric("reward/median") is None


IMPORT = """
import sys, areal_hpc
areal_hpc.__version__, areal_hpc.RecipeError
heavy = {"torch", "sglang", "transformers", "openai", "h5py", "numpy", "pydantic", "omegaconf"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
areal_hpc.load_recipe, areal_hpc.run, areal_hpc.submit, areal_hpc.PPOTrainer
assert "torch" not in sys.modules
"""


def test_importing_it_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", IMPORT], check=True, timeout=scaled(60))


PROCESS_MAIN = """
import sys
import areal_hpc.jobs.processes.process_main
heavy = [name for name in sys.modules if name.startswith(("torch", "numpy", "areal_hpc.recipe"))]
assert not heavy, heavy
"""


def test_processes_start_without_what_only_some_of_them_need() -> None:
    subprocess.run([sys.executable, "-c", PROCESS_MAIN], check=True, timeout=scaled(60))


def test_every_name_is_there() -> None:
    assert {*areal_hpc.__all__} <= {*dir(areal_hpc)}
    assert all(getattr(areal_hpc, name) is not None for name in areal_hpc.__all__)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        areal_hpc.trian  # type: ignore[attr-defined]  # noqa: B018


def test_keys_of_a_recipe_are_overridden() -> None:
    recipe = areal_hpc.load_recipe("recipes/quickstart.yaml")
    with pytest.raises(areal_hpc.RecipeError, match="total_stps"):
        areal_hpc.run(recipe, trainer={"total_stps": 2})
    with pytest.raises(areal_hpc.RecipeError, match="total_stps"):
        areal_hpc.submit("recipes/quickstart.yaml", trainer={"total_stps": 2})


@pytest.mark.parametrize(
    "text", ["costs ${trainer.total_steps}", "\\\\${x}", "null", "1e5", "[a]", "a: b", "", "0x1F"]
)
def test_a_text_given_in_python_is_not_read_as_yaml(text: str) -> None:
    for recipe in ("recipes/quickstart.yaml", areal_hpc.load_recipe("recipes/quickstart.yaml")):
        loaded = load_with_overrides(recipe, {"rollout": {"workflow_kwargs": {"text": text}}})
        assert loaded.rollout.workflow_kwargs["text"] == text


def types(trainer: PPOTrainer) -> None:
    """Nothing calls this function: mypy reads it."""
    assert_type(areal_hpc.load_recipe(Path("r.yaml")), areal_hpc.Recipe)
    result = areal_hpc.run("r.yaml", trainer={"total_steps": 2})
    assert_type(result, areal_hpc.RunResult)
    assert_type(result.reward, float | None)
    assert_type(areal_hpc.open_run("run"), areal_hpc.RunData)
    assert_type(areal_hpc.submit("r.yaml", wait=True).run_dir, Path)
    # AReaL's names are the same classes.
    ours: areal_hpc.PPOTrainer = trainer
    reward: areal_hpc.AsyncRewardWrapper = AsyncRewardWrapper(len)
    print(ours, reward)


class OwnAgent:
    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        return 1.0


AGENT: areal_hpc.Agent = OwnAgent()

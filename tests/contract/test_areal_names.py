"""AReaL's names import under AReaL's import root and under ours, and its files become recipes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.commands import exit_code_of, run_program, said_by
from tests.support.environments import CHECKOUT

IMPORTS = """
from areal.api.cli_args import AgentRLConfig, GenerationHyperparameters, GRPOConfig, PPOConfig
from areal.api.cli_args import load_expr_config
from areal.api.reward_api import AsyncRewardWrapper
from areal.api.workflow_api import AgentWorkflow, RolloutWorkflow
from areal.experimental.openai import ArealOpenAI
from areal.experimental.trainer import PPOTrainer
from areal.utils.dynamic_import import import_from_string
from areal.utils.hf_utils import load_hf_tokenizer
from areal.utils.stats_logger import StatsLogger
import areal.launcher.local
"""
OUR_NAMES = """
from areal_hpc.areal.api.cli_args import GRPOConfig
from areal_hpc.areal.api.workflow_api import RolloutWorkflow
from areal_hpc.areal.utils.dynamic_import import import_from_string
"""
NEWER = """
import areal
import areal.api.cli_args
from areal import PPOTrainer
from areal.api import AsyncRewardWrapper
from areal.dataset import get_custom_dataset
import areal.infra.launcher.local
from areal.experimental.openai.client import ArealOpenAI as Client
from areal_hpc import ArealOpenAI, PPOTrainer as Trainer
from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper as Ours
from areal.utils.dynamic_import import import_from_string
assert AsyncRewardWrapper is Ours
assert Client is ArealOpenAI
assert PPOTrainer is Trainer
assert import_from_string("areal.api.reward_api.AsyncRewardWrapper") is Ours
import inspect
asked = [*inspect.signature(load_hf_tokenizer).parameters]
assert asked == ["model_name_or_path", "fast_tokenizer", "padding_side"]
import areal_hpc.areal.api.cli_args
assert areal.api.cli_args is areal_hpc.areal.api.cli_args
assert areal_hpc.areal.api.cli_args.__spec__.name == "areal_hpc.areal.api.cli_args"
"""


AGENT = """
from areal.api import AsyncRewardWrapper

def reward(completions, answer):
    return float(completions == answer)
"""
AWAITS_REWARD = """
import asyncio
import agent

if __name__ == "__main__":
    print(asyncio.run(agent.AsyncRewardWrapper(agent.reward)(completions="7", answer="7")))
"""


UNKNOWN = {
    "import areal.api.workflows_api": "did you mean areal.api.workflow_api?",
    "import areal.apis": "did you mean areal.api?",
    "import areal.workflow.nothing_of_ours": "areal_hpc does not provide 'areal.workflow",
    "from areal.api import AsyncRewardWraper": "cannot import name 'AsyncRewardWraper'",
    "import areal.ledger.tickets": "areal_hpc does not provide 'areal.ledger",
}
TRIES = """
for line in {lines}:
    try:
        exec(line)
    except ImportError as error:
        print(error)
"""


def python(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    path = os.pathsep.join([str(CHECKOUT), str(tmp_path / "path")])
    words = (sys.executable, *arguments, script, "one", "two")
    return run_program(*words, folder=tmp_path, environ={**os.environ, "PYTHONPATH": path})


def test_names_are_found_under_our_root_and_areal_stays_free(tmp_path: Path) -> None:
    answer = python(tmp_path, f"{OUR_NAMES}print('found')\nimport areal")
    assert answer.stdout == "found\n", answer.stderr
    assert "No module named 'areal'" in answer.stderr


def test_names_are_found_under_areal_on_request(tmp_path: Path) -> None:
    """Check all names in one process, as they import much."""
    (tmp_path / "agent.py").write_text(AGENT)
    arguments_check = "import sys\nassert sys.argv[1:] == ['one', 'two']\n"
    names = "".join(f"    {line}\n" for line in (IMPORTS + NEWER + arguments_check).splitlines())
    tries = TRIES.format(lines=[*UNKNOWN]).replace("\n", "\n    ")
    text = f"{AWAITS_REWARD}{names}    {tries}"
    first, *problems = said_by(python(tmp_path, text, "-m", "areal_hpc.areal")).splitlines()
    assert first == "1.0", "computed in a process that finds the names too"
    for problem, expected in zip(filter(str.strip, problems), UNKNOWN.values(), strict=True):
        assert expected in problem


def test_a_script_may_ask_for_the_names_itself(tmp_path: Path) -> None:
    text = "import areal_hpc.areal.import_hook\nfrom areal.api.workflow_api import AgentWorkflow\n"
    said_by(python(tmp_path, text))


@pytest.mark.parametrize("way", [("-m", "areal_hpc.areal"), ()])
def test_a_real_areal_is_never_hidden(tmp_path: Path, way: tuple[str, ...]) -> None:
    (tmp_path / "path" / "areal").mkdir(parents=True)
    (tmp_path / "path" / "areal" / "__init__.py").touch()
    answer = python(tmp_path, "import areal_hpc.areal.import_hook", *way)
    assert answer.returncode == 1
    assert "AReaL itself is installed" in answer.stderr


def test_a_launcher_runs_the_script_with_its_arguments_and_tells_our_errors(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("x = 7")
    text = (
        "import sys, beside\nassert __name__ == '__main__'\nprint(beside.x, sys.argv[1:])\n"
        "from areal_hpc.areal.api.cli_args import GRPOConfig, load_expr_config\n"
        "load_expr_config(['--config', 'nowhere.yaml'], GRPOConfig)\n"
    )
    answer = python(tmp_path, text, "-m", "areal_hpc.areal.launcher.local")
    assert answer.stdout == "7 ['one', 'two']\n", answer.stderr
    assert answer.returncode == 78
    assert answer.stderr.startswith("error: there is no configuration at nowhere.yaml")


FOLDER = Path(__file__).parent


def test_a_file_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipe.yaml"
    config = FOLDER / "areal_config.yaml"
    assert exit_code_of("migrate", config, "--rows", "1000", "--out", out) == 0
    assert "workflow: areal_hpc.areal.workflow.openai.math_agent.MathAgent" in out.read_text()
    assert "total_steps: 30" in out.read_text()
    output = capsys.readouterr().out
    assert "#   actor.adv_norm.mean_level: batch\n#     advantages" in output
    assert "Before it can run" not in output


def test_gsm8k_on_the_hub_is_migrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "gsm8k.yaml"
    config.write_text(
        "{experiment_name: e, trial_name: t, actor: {path: Qwen/Qwen3-0.6B}, total_train_epochs: 1,"
        " train_dataset: {path: openai/gsm8k, batch_size: 8}, valid_dataset: {path: a/b}}"
    )
    assert exit_code_of("migrate", config, "--rows", "80") == 0
    text, lacks = capsys.readouterr().out.split("# No counterpart:")
    assert yaml.safe_load(text)["train_dataset"] == {
        "hub": "openai/gsm8k/main/train-*.parquet",
        "to_task": "areal_hpc.dataset.adapters:convert_gsm8k",
    }
    assert "set valid_dataset.hub=a/b/FILES" in lacks
    assert "rollout.workflow: this key is required" in lacks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: /m}", "this is not an AReaL configuration"),
        ("{rollout: {n_samples: 4}, trainer: {}}", "this is a recipe"),
    ],
)
def test_other_files_are_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "other.yaml"
    config.write_text(text)
    assert exit_code_of("migrate", config) == 78
    assert message in capsys.readouterr().err


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert exit_code_of("migrate", tmp_path / "none.yaml") == 78

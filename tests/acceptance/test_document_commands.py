"""Commands and training scripts of AReaL's guides, run to the end; other tests run other blocks.

Blocks of Python that stand alone are run by `tests/integration/agents/documents`, the agents of the
rest by `tests/integration/agents/test_agents.py`.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from areal_hpc.areal.api.cli_args import AgentRLConfig, to_config
from areal_hpc.areal.rules import find_rule_key, flatten_to_dotted_keys
from areal_hpc.areal.translation import translate_to_recipe
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.chatml import make_talking_model
from tests.support.commands import audit_of, run_program
from tests.support.documents import SCENES, Block, Patch, blocks, patched
from tests.support.environments import CHECKOUT, python_of
from tests.support.run_files import logs_of
from tests.support.small_run import processes_of

BLOCKS = {block.key: block for block in blocks()}
SETTINGS = [block for block in BLOCKS.values() if block.language == "yaml"]
OURS = Patch("-m areal.", "-m areal_hpc.areal.", "the import root")
NAMES = (
    Patch("<your experiment name>", "guide", "a name of the reader's"),
    Patch("<your trial name>", "trial", "a name of the reader's"),
)
TASKS = [
    {"messages": [{"role": "user", "content": f"What is {n} + {n}?"}], "answer": str(2 * n)}
    for n in range(1, 5)
]


@dataclass(frozen=True)
class Command:
    """A block of commands, or a script, that ends in a training."""

    run: str
    """Experiment and trial of the run that it leaves."""
    patches: tuple[Patch, ...] = ()
    environment: str = "main"
    before: str = ""
    """Commands of the script above the block."""
    after: str = ""


def _shown(*keys: str) -> str:
    """Text of blocks that a guide showed before, as they are run."""
    return "\n".join(SCENES[key].text_of(BLOCKS[key]) for key in keys)


OWN_MODULE = SCENES["custom_agents_zh:1"].before + "\nimport os\n" + _shown("custom_agents_zh:1")
"""The reader's `my_module`."""
SCRIPT = """
import asyncio, sys
from agents import ModelSettings, OpenAIProvider, RunConfig, Runner as OpenAIRunner
from areal.api.cli_args import AgentRLConfig, GenerationHyperparameters, load_expr_config
from areal.api.reward_api import AsyncRewardWrapper
from areal.dataset import get_custom_dataset
PreTrainedTokenizerFast = object
class Folder(str):
    pad_token_id, eos_token_id = 0, 2
"""
TRAINS = {
    "agent_workflow_training:1": Command("agent-workflow/trial0"),
    "agentic_rl:8": Command("guide/trial", (OURS, *NAMES), "camel"),
    "agentic_rl:15": Command(
        "openai-agents/trial0",
        (
            Patch(
                "load_hf_tokenizer(", "Folder(", "transformers is not needed beside the Agents SDK"
            ),
        ),
        before=SCRIPT + _shown("agentic_rl:13", "agentic_rl:14"),
        after="main(sys.argv[1:])",
    ),
    "agentic_rl:16": Command("guide/trial", (OURS, *NAMES)),
    "custom_agents_zh:2": Command(
        "agent-workflow/trial0",
        before="import sys\n"
        "from areal.api.cli_args import AgentRLConfig, load_expr_config\n"
        "from areal.dataset import get_custom_dataset\n"
        "from areal.experimental.trainer import PPOTrainer\n"
        "config, _ = load_expr_config(sys.argv[1:], AgentRLConfig)\n"
        'trainer = PPOTrainer(config, get_custom_dataset("train", config.train_dataset))\n',
    ),
    "openai_agents:3": Command("my_agent_experiment/trial0", (OURS,)),
    "proxy_mode:1": Command(
        "agent-workflow/trial0",
        (Patch("/path/to/AReaL", str(CHECKOUT), "the path of the clone"),),
    ),
}
"""Run as a reader would type it, to the end of a training of one step."""
PLAYS = ("proxy_mode:3", "proxy_mode:4", "proxy_mode:5", "proxy_mode:6")
"""Commands whose agents play an episode, or are refused, in `test_agents.py`."""
INSTALLS = ("agentic_rl:1", "openai_agents:2", "openai_agents:17")


def test_every_block_that_can_run_is_run() -> None:
    run = {key for key, block in BLOCKS.items() if block.language in ("python", "command")}
    assert run == {*SCENES, *TRAINS, *PLAYS, *INSTALLS}


@pytest.mark.parametrize("key", INSTALLS)
def test_what_a_guide_installs_is_in_a_locked_environment(key: str) -> None:
    packages = re.findall(r"^pip install (\S+)$", BLOCKS[key].text, re.MULTILINE)
    assert packages
    locks = "".join((CHECKOUT / f".venvs/{name}.txt").read_text() for name in ("main", "camel"))
    for package in packages:
        assert re.search(rf"^{package}==", locks, re.MULTILINE), package


@pytest.mark.parametrize("block", SETTINGS, ids=lambda block: block.key)
def test_settings_are_read_and_have_a_counterpart(block: Block) -> None:
    values = yaml.safe_load(block.text)
    to_config(values, AgentRLConfig, block.key)
    translation = translate_to_recipe({"actor": {}, **values})
    assert translation.untranslated == []
    assert {key for key in flatten_to_dotted_keys(values) if not find_rule_key(key)} == set()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("key", TRAINS)
def test_a_command_of_the_guides_trains(key: str, tmp_path: Path) -> None:
    command, block = TRAINS[key], BLOCKS[key]
    parts = filter(None, (command.before, block.text, command.after))
    text = patched(block, "\n".join(parts), command.patches).rstrip("\n")
    if block.language == "python":
        (tmp_path / "script.py").write_text(text)
        (tmp_path / "my_module.py").write_text(OWN_MODULE)
        config = f"examples/{command.run.partition('/')[0].replace('-', '_')}/config.yaml"
        text = f"python3 -m areal_hpc.areal {tmp_path / 'script.py'} --config {config}"
    separator = "\n" if text.endswith("\\") else " "
    environ = {
        **os.environ,
        "PATH": f"{python_of(command.environment).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
    }
    shell = ("bash", "-c", text + separator + " ".join(make_inputs(tmp_path)))
    answer = run_program(*shell, environ=environ, timeout_s=360)
    paths = RunPaths(tmp_path / command.run)
    assert answer.returncode == 0, answer.stdout + answer.stderr + logs_of(paths)
    steps = [row["step"] for row in read_readable_records(paths.metrics)]
    assert steps == [0, 1], answer.stdout
    assert audit_of(paths.root) == "trained_once=1 duplicates=0 lost=0 open=0"
    assert processes_of(paths.root) == []


def make_inputs(folder: Path) -> list[str]:
    """A model that writes text and ends, tasks, and overrides by which a configuration is small."""
    model_dir, data_dir = folder / "model", folder / "data"
    make_talking_model(model_dir)
    data_dir.mkdir()
    for split in ("train", "test"):
        (data_dir / f"{split}.jsonl").write_text("\n".join(map(json.dumps, TASKS)))
    return [
        *(f"cluster.fileroot={folder}", f"actor.path={model_dir}"),
        *(f"train_dataset.path={data_dir}", f"valid_dataset.path={data_dir}"),
        *("cluster.n_gpus_per_node=1", "rollout.backend=sglang:d1", "actor.backend=megatron:d1"),
        *("actor.dtype=float32", "sglang.dtype=float32", "sglang.max_total_tokens=16384"),
        *("total_train_steps=1", "train_dataset.batch_size=1", "gconfig.n_samples=2"),
        *("rollout.max_concurrent_rollouts=2", "rollout.max_head_offpolicyness=0"),
        *("gconfig.max_new_tokens=64", "gconfig.max_tokens=4096"),
    ]

"""How the commands and the training scripts of AReaL's guides are run.

`trains`: as a reader would type it, to the end of a training of one step. `plays`: its agents play
an episode on the real stack. `refused`: no locked environment has the package, and the error says
what to install. `locked`: what it would install is in a locked environment.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.support.document_scenes import SCENES, Patch, patched
from tests.support.documents import Block, blocks
from tests.support.environments import CHECKOUT

SLOW = "tests/acceptance/test_document_commands.py"
PLAYED = "tests/integration/agents/test_workflows.py"
LOCKED = "tests/acceptance/test_documents.py"
OURS = Patch("-m areal.", "-m areal_hpc.areal.", "the import root")
NAMES = (
    Patch("<your experiment name>", "guide", "a name of the reader's"),
    Patch("<your trial name>", "trial", "a name of the reader's"),
)


@dataclass(frozen=True)
class Command:
    """One block of commands, or a script that ends in a training."""

    how: Literal["trains", "plays", "refused", "locked"]
    test: str
    environment: str = "main"
    patches: tuple[Patch, ...] = ()
    run: str = ""
    """Experiment and trial of the run that it leaves."""
    before: str = ""
    """What stands in the script above the block."""
    after: str = ""

    def text_of(self, block: Block) -> str:
        """The block as it is run, with what stands around it."""
        text = "\n".join(part for part in (self.before, block.text, self.after) if part)
        return patched(block, text, self.patches)


def _shown(*keys: str) -> str:
    """Text of blocks that a guide showed before, as they are run."""
    found = {block.key: block for block in blocks()}
    return "\n".join(SCENES[key].text_of(found[key]) for key in keys)


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
COMMANDS = {
    "agent_workflow_training:1": Command("trains", SLOW, run="agent-workflow/trial0"),
    "agentic_rl:1": Command("locked", LOCKED),
    "agentic_rl:8": Command("trains", SLOW, "camel", (OURS, *NAMES), "guide/trial"),
    "agentic_rl:15": Command(
        "trains",
        SLOW,
        "main",
        (
            Patch(
                "load_hf_tokenizer(", "Folder(", "transformers is not needed beside the Agents SDK"
            ),
        ),
        "openai-agents/trial0",
        before=SCRIPT + _shown("agentic_rl:13", "agentic_rl:14"),
        after="main(sys.argv[1:])",
    ),
    "agentic_rl:16": Command("trains", SLOW, "main", (OURS, *NAMES), "guide/trial"),
    "custom_agents_zh:2": Command(
        "trains",
        SLOW,
        run="agent-workflow/trial0",
        before="import sys\n"
        "from areal.api.cli_args import AgentRLConfig, load_expr_config\n"
        "from areal.dataset import get_custom_dataset\n"
        "from areal.experimental.trainer import PPOTrainer\n"
        "config, _ = load_expr_config(sys.argv[1:], AgentRLConfig)\n"
        'trainer = PPOTrainer(config, get_custom_dataset("train", config.train_dataset))\n',
    ),
    "openai_agents:2": Command("locked", LOCKED),
    "openai_agents:3": Command("trains", SLOW, "main", (OURS,), "my_agent_experiment/trial0"),
    "openai_agents:17": Command("locked", LOCKED),
    "proxy_mode:1": Command(
        "trains",
        SLOW,
        patches=(Patch("/path/to/AReaL", str(CHECKOUT), "the path of the clone"),),
        run="agent-workflow/trial0",
    ),
    "proxy_mode:3": Command("plays", PLAYED, "main"),
    "proxy_mode:4": Command("plays", PLAYED),
    "proxy_mode:5": Command("plays", PLAYED, "main"),
    "proxy_mode:6": Command("refused", PLAYED),
}
"""By the key of the block."""


def overrides(fileroot: Path, model_dir: Path, data_dir: Path) -> list[str]:
    """What makes a shipped configuration small."""
    return [
        *(f"cluster.fileroot={fileroot}", f"actor.path={model_dir}"),
        *(f"train_dataset.path={data_dir}", f"valid_dataset.path={data_dir}"),
        *("cluster.n_gpus_per_node=1", "rollout.backend=sglang:d1", "actor.backend=megatron:d1"),
        *("actor.dtype=float32", "sglang.dtype=float32", "sglang.max_total_tokens=16384"),
        *("total_train_steps=1", "train_dataset.batch_size=1", "gconfig.n_samples=2"),
        *("rollout.max_concurrent_rollouts=2", "rollout.max_head_offpolicyness=0"),
        *("gconfig.max_new_tokens=64", "gconfig.max_tokens=4096"),
    ]

"""Modules of AReaL's that only name things which live elsewhere; they are made when imported."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from areal_hpc.recipe.user_functions import import_by_path

ROOT = "areal_hpc.areal."
_HELPERS = "areal_hpc.areal.helpers"
_TRAINER = {"PPOTrainer": "areal_hpc.areal.ppo_trainer.PPOTrainer"}
_CLIENT = {"ArealOpenAI": "areal_hpc.client.areal_openai.ArealOpenAI"}

MODULES: dict[str, dict[str, str]] = {
    "api.reward_api": {
        "AsyncRewardWrapper": "areal_hpc.rollout.execution.reward_wrapper.AsyncRewardWrapper",
    },
    "api.workflow_api": {
        "AgentWorkflow": "areal_hpc.rollout.agent.AgentWorkflow",
        "RolloutWorkflow": "areal_hpc.rollout.agent.RolloutWorkflow",
    },
    "experimental.camel.openai_model": {
        "AReaLOpenAICompatibleModel": "areal_hpc.client.camel.AReaLOpenAICompatibleModel",
    },
    "experimental.openai": _CLIENT,
    "experimental.openai.client": _CLIENT,
    "experimental.trainer": _TRAINER,
    "reward.gsm8k": {"gsm8k_reward_fn": "areal_hpc.reward.gsm8k.gsm8k_reward_fn"},
    "utils.dynamic_import": {"import_from_string": f"{_HELPERS}.import_from_string"},
    "utils.hf_utils": {"load_hf_tokenizer": f"{_HELPERS}.load_hf_tokenizer"},
    "utils.stats_logger": {"StatsLogger": f"{_HELPERS}.StatsLogger"},
    "workflow.anthropic.math_agent": {
        "MathAgent": "areal_hpc.agents.anthropic_agent.AnthropicMathAgent",
    },
    "workflow.camel.math_agent": {"MathAgent": "areal_hpc.agents.camel_agent.CamelMathAgent"},
    "workflow.langchain.math_agent": {
        "MathAgent": "areal_hpc.agents.langchain_agent.LangChainMathAgent",
        "MathToolAgent": "areal_hpc.agents.langchain_agent.LangGraphMathAgent",
    },
    "workflow.openai.math_agent": {
        "MathAgent": "areal_hpc.agents.openai_agent.OpenAIMathAgent",
        "MathToolAgent": "areal_hpc.agents.openai_agent.OpenAIMathToolAgent",
        "MultiTurnMathAgent": "areal_hpc.agents.openai_agent.MultiTurnMathAgent",
    },
    "workflow.openai_agent.math_agent": {
        "MathAgent": "areal_hpc.agents.openai_agents_sdk.AgentsSdkMathTeam",
        "build_math_agent": "areal_hpc.agents.openai_agents_sdk.build_math_agent",
        "build_single_agent": "areal_hpc.agents.openai_agents_sdk.build_single_agent",
    },
    "workflow.openhands.math_agent": {
        "MathAgent": "areal_hpc.agents.openhands_agent.OpenHandsMathAgent",
        "MathToolAgent": "areal_hpc.agents.openhands_agent.OpenHandsTerminalAgent",
    },
}
"""Module below `areal_hpc.areal` -> its names, and where each is."""
PACKAGES = {module.rpartition(".")[0] for module in MODULES} | {"workflow"}
PACKAGES.discard("api")  # which has a folder, for it holds code


class ReexportFinder(MetaPathFinder, Loader):
    """Makes the modules of the table."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        module = name.removeprefix(ROOT) if name.startswith(ROOT) else ""
        if module in MODULES or module in PACKAGES:
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        for name, target in MODULES.get(module.__name__.removeprefix(ROOT), {}).items():
            setattr(module, name, import_by_path(target))


def install_reexports() -> None:
    """Let the modules of the table be imported; a second call changes nothing."""
    if not any(isinstance(finder, ReexportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ReexportFinder())

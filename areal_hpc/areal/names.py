"""AReaL's modules that consist of names of objects elsewhere, and its import root `areal`.

The modules are made when they are imported; `areal` only after a request, see `import_hook`.
"""

import difflib
import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.user_functions import import_by_path

_AREAL_PACKAGE = "areal"
_ROOT = "areal_hpc.areal."
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
}
"""Names of modules below `areal_hpc.areal`, each with the dotted path of its object."""
_PACKAGES = {module.rpartition(".")[0] for module in MODULES} | {"workflow"}
_PACKAGES.discard("api")  # a folder with code exists
_OLD_MODULE_BY_NEW = {
    "areal.infra": "areal.launcher",
    "areal.infra.launcher": "areal.launcher",
    "areal.infra.launcher.local": "areal.launcher.local",
}
"""Older paths of AReaL's modules, which exist here, by their newer ones."""


class NameFinder(MetaPathFinder, Loader):
    """Import finder of the modules in `MODULES`, and of `areal` as aliases of our modules."""

    answers_areal = False

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.startswith(_ROOT) and name.removeprefix(_ROOT) in (*MODULES, *_PACKAGES):
            return ModuleSpec(name, self, is_package=True)
        if not self.answers_areal or name.partition(".")[0] != _AREAL_PACKAGE:
            return None
        own_name = f"areal_hpc.{_OLD_MODULE_BY_NEW.get(name, name)}"
        try:
            exists = importlib.util.find_spec(own_name) is not None
        except ModuleNotFoundError:
            exists = False
        if not exists:
            raise ModuleNotFoundError(_describe_unknown_module(name), name=name)
        return ModuleSpec(name, self, is_package=True, loader_state=own_name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.loader_state is None:
            return None
        module = importlib.import_module(spec.loader_state)
        spec.loader_state = module.__spec__  # kept, because the import system replaces it
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state
            return
        for name, target in MODULES.get(module.__name__.removeprefix(_ROOT), {}).items():
            setattr(module, name, import_by_path(target))


_finder = NameFinder()


def install_name_finder() -> None:
    """Make the modules of the table importable; a second call changes nothing."""
    # It comes first, as Python's finder would load second copies from the package's folder.
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def answer_imports_of_areal() -> None:
    """Resolve `import areal...` from now on; a second call changes nothing.

    Raises:
        RecipeError: A real AReaL is installed.
    """
    if not _finder.answers_areal and PathFinder.find_spec(_AREAL_PACKAGE) is not None:
        raise RecipeError(
            "AReaL itself is installed in this environment, so the import hook for `areal` is "
            "not installed",
            hint="uninstall it, or change the import root to areal_hpc.areal",
        )
    _finder.answers_areal = True


def _describe_unknown_module(module_name: str) -> str:
    package = Path(__file__).parent
    files = (path.relative_to(package).with_suffix("") for path in package.rglob("*.py"))
    known = [".".join(file.parts).removesuffix(".__init__") for file in files]
    known = [f"{_AREAL_PACKAGE}.{name}" for name in (*known, *MODULES)]
    near = difflib.get_close_matches(module_name, [*known, *_OLD_MODULE_BY_NEW], n=1)
    return f"areal_hpc does not provide {module_name!r}" + (
        f"; did you mean {near[0]}?" if near else ""
    )

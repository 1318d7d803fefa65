"""Reinforcement learning of LLM agents on Slurm clusters: the public API.

Names are imported at their first use, so importing the package imports neither torch nor any other
heavy module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from areal_hpc.checkout import format_install_command
from areal_hpc.errors import (
    AgentError,
    ArealError,
    ClusterError,
    JobFailedError,
    Problem,
    RecipeError,
    ShardError,
    WeightSyncError,
)

__version__ = "0.1.0"  # a wheel has the version of its tag

if TYPE_CHECKING:
    from areal_hpc.areal.ppo_trainer import PPOTrainer
    from areal_hpc.client.areal_openai import ArealOpenAI
    from areal_hpc.launch.run import RunResult, run, submit
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.recipe import Recipe
    from areal_hpc.rollout.agent import Agent
    from areal_hpc.rollout.execution.reward_wrapper import AsyncRewardWrapper
    from areal_hpc.view.state.run_data import RunData, open_run
    from areal_hpc.wire.agent_reward import Reward
else:
    _LAZY_IMPORTS = {
        "Agent": ("areal_hpc.rollout.agent", "Agent"),
        "ArealOpenAI": ("areal_hpc.client.areal_openai", "ArealOpenAI"),
        "AsyncRewardWrapper": ("areal_hpc.rollout.execution.reward_wrapper", "AsyncRewardWrapper"),
        "PPOTrainer": ("areal_hpc.areal.ppo_trainer", "PPOTrainer"),
        "Recipe": ("areal_hpc.recipe.recipe", "Recipe"),
        "Reward": ("areal_hpc.wire.agent_reward", "Reward"),
        "RunData": ("areal_hpc.view.state.run_data", "RunData"),
        "RunResult": ("areal_hpc.launch.run", "RunResult"),
        "load_recipe": ("areal_hpc.recipe.loading", "load_recipe"),
        "open_run": ("areal_hpc.view.state.run_data", "open_run"),
        "run": ("areal_hpc.launch.run", "run"),
        "submit": ("areal_hpc.launch.run", "submit"),
    }

    def __getattr__(name: str) -> object:
        if name not in _LAZY_IMPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, attribute = _LAZY_IMPORTS[name]
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package in ("", "areal_hpc"):
                raise
            raise ImportError(
                f"areal_hpc.{name} needs the package {package}, which this Python lacks\n"
                f"  try: {format_install_command('main')}",
                name=error.name,
            ) from error

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LAZY_IMPORTS})


__all__ = [
    "Agent",
    "AgentError",
    "ArealError",
    "ArealOpenAI",
    "AsyncRewardWrapper",
    "ClusterError",
    "JobFailedError",
    "PPOTrainer",
    "Problem",
    "Recipe",
    "RecipeError",
    "Reward",
    "RunData",
    "RunResult",
    "ShardError",
    "WeightSyncError",
    "__version__",
    "load_recipe",
    "open_run",
    "run",
    "submit",
]

"""AReaL's `areal.experimental.trainer` (re-exports `PPOTrainer`)."""

from areal_hpc.areal.ppo_trainer import PPOTrainer

__all__ = ["PPOTrainer"]

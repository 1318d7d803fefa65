"""The trainer that scripts use."""

from areal_hpc.ppo_trainer import PPOTrainer

__all__ = ["PPOTrainer"]

"""Reinforcement learning of LLM agents on Slurm clusters."""

__version__ = "0.1.0"

"""Supervised fine-tuning: the stage before reinforcement learning."""

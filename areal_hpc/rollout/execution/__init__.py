"""Execution of agents: worker processes, sandboxes, pickling, reward functions, errors."""

"""Where an agent runs: worker processes, pickling, reward functions."""

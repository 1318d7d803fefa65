"""Ready-to-use agents: mathematics, once with each framework."""

"""Episodes: one run of an agent, groups of them, their limits and filters."""

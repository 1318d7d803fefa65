"""Episodes: one run of an agent on one task, groups of them, their limits and filters."""

"""AReaL's `areal.workflow` package: each agent is one of `areal_hpc.agents`."""

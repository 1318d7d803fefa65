"""Attacks of a hostile program in the sandbox of an agent, and the agent whose tool it is."""

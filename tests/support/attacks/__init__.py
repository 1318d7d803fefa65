"""What a hostile program tries in the sandbox of an agent, and the agent whose tool it is."""

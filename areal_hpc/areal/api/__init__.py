"""AReaL's paths for what agents and scripts import; each name lives elsewhere."""

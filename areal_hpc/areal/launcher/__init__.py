"""AReaL's paths of its launchers."""

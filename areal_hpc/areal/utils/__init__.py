"""AReaL's paths of what its scripts need besides."""

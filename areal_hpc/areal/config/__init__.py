"""AReaL's configuration: schema, loading, and translation into a recipe."""

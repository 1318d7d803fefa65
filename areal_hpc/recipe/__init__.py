"""Recipe, the configuration of a run: models of its keys, loading, and checks."""

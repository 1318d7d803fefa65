"""AReaL's configuration: names and defaults, how it is read, what it becomes in a recipe."""

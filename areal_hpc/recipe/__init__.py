"""Recipe: the models of every key, where a recipe comes from, and its checks."""

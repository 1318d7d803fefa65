"""Task sets: where rows come from, and their form as tasks."""

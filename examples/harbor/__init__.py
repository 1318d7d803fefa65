"""A tiny model learns to let the shell reckon, in sandboxes, on tasks in Harbor's format."""

"""Ways to start a sandbox."""

"""Ready-to-use agents."""

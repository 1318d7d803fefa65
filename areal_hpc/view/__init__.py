"""Read-only views of a run: progress, summary, learning curve."""

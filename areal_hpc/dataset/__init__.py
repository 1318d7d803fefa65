"""Task sets: sources of rows, and their conversion to tasks."""

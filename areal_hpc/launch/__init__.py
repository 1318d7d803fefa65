"""From a recipe to jobs: plan a run, prepare its directory, start or submit its jobs."""

"""Jobs of a run: the supervisor of each task, starts, restarts, the caretaker, time limit."""

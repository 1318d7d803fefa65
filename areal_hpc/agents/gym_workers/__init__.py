"""Worker programs in a gym's own Python; they import `worker_loop.py` and the gym's packages."""

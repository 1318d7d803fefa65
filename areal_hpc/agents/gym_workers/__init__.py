"""Programs that run in a gym's own Python: the standard library, `worker_loop.py` and the gym."""

"""The training loop: rank 0 decides what is done next, and all ranks do it."""

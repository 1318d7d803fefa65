"""Random ids of requests and replies."""

import os
import random

_generator = random.Random()
"""Ids must differ, and open nothing: keys do, which the operating system makes. It is asked once a
process, because each question lets another thread in."""


def _seed() -> None:
    _generator.seed(os.urandom(32))


_seed()
os.register_at_fork(after_in_child=_seed)


def make_random_id(num_bytes: int) -> str:
    """So many random bytes as hexadecimal digits; not secret."""
    return _generator.randbytes(num_bytes).hex()

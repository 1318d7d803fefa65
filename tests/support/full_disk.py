"""A disk without room, as a limit on the size of files."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond the limit; Python ignores the signal that says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

"""Count of bytes read from files by position, as checkpoints are read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    sizes: list[int] = []
    preadv = os.preadv

    def count(file: int, buffers: Any, offset: int) -> int:
        sizes.append(preadv(file, buffers, offset))
        return sizes[-1]

    with mock.patch.object(os, "preadv", count):
        yield sizes

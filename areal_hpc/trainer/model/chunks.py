"""Rows of a matrix, a few at a time: temporaries stay small, and on a CPU in the cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK_VALUES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Values of one chunk: 1 MiB of float32 fits a core's cache, 256 MiB keeps a GPU busy."""


def row_chunks(matrix: torch.Tensor) -> Iterator[slice]:
    """Slices that cover the rows of `matrix`."""
    rows = max(1, CHUNK_VALUES[matrix.device.type] // max(1, matrix.shape[1]))
    for start in range(0, matrix.shape[0], rows):
        yield slice(start, start + rows)

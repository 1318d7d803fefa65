"""Incarnations of the trainer: each start takes the next number, exclusively."""

from __future__ import annotations

import os
from pathlib import Path


def claim_next_number(directory: Path) -> int:
    """Create the next epoch file (O_EXCL) and return its number, counted from 1.

    Two trainers that start at once get two numbers; the lower one is thereby fenced.
    """
    directory.mkdir(parents=True, exist_ok=True)
    epoch = read_newest_number(directory) + 1
    while True:
        try:
            descriptor = os.open(
                directory / f"{epoch:04d}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
            )
        except FileExistsError:
            epoch += 1
            continue
        os.close(descriptor)
        return epoch


def read_newest_number(directory: Path) -> int:
    """The highest epoch taken so far; 0 before the first."""
    if not directory.is_dir():
        return 0
    return max(
        (int(entry.name) for entry in directory.iterdir() if entry.name.isdigit()), default=0
    )

"""Two trainer ranks, processes of their own, that send weights together."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.sender_rank import RANKS
from tests.support.service_keys import SERVICE_KEY


class SenderRanks:
    """The orders that rank 0 takes."""

    def __init__(self, first: subprocess.Popen[bytes]) -> None:
        assert first.stdin is not None
        assert first.stdout is not None
        self._orders, self._reports = first.stdin, first.stdout
        assert self._read() == {"ready": True}

    def update(self, step: int, weights: Path, at_least: int) -> dict[str, Any]:
        """Update all replicas that lack the step; who was told to whom, and what came of it."""
        order = {"step": step, "weights": str(weights), "at_least": at_least}
        self._orders.write(json.dumps(order).encode() + b"\n")
        self._orders.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._reports.readline()
        assert line, "rank 0 is gone: read its log"
        report: dict[str, Any] = json.loads(line)
        return report


@contextmanager
def sender_ranks(
    directory: Path,
    first_weights: Path,
    log_dir: Path,
    *,
    cells: int,
    backend: str,
    service_key: str = SERVICE_KEY,
    generation: int = 1,
    **weights: Any,
) -> Iterator[SenderRanks]:
    """Both ranks, which find control proxies in `directory`; they end in order, with code 0."""
    config = {
        "directory": str(directory),
        "first_weights": str(first_weights),
        "store": str(log_dir / "store"),
        "service_key": service_key,
        "generation": generation,
        "cells": cells,
        "backend": backend,
        "weights": weights,
    }
    ranks = []
    for rank in range(RANKS):
        with (log_dir / f"rank.{rank}.log").open("wb") as log_file:
            command = [sys.executable, "-m", "tests.support.sender_rank"]
            ranks.append(
                subprocess.Popen(
                    [*command, json.dumps({**config, "rank": rank})],
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=log_file,
                    cwd=CHECKOUT,
                )
            )
    first = ranks[0]
    try:
        yield SenderRanks(first)
        assert first.stdin is not None
        first.stdin.close()
        assert [process.wait(scaled(60)) for process in ranks] == [0] * RANKS
    finally:
        for process in ranks:
            process.kill()
            process.wait()
        for pipe in (first.stdin, first.stdout):
            if pipe is not None:
                pipe.close()

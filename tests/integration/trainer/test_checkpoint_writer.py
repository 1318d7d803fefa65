"""The writer of checkpoints beside its rank."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from areal_hpc.trainer.checkpoints.writer_client import WriterClient
from tests.support.waiting import wait_for

SELECT_LIMIT = 1024
"""Descriptors from this number on are beyond what `select()` takes."""


@pytest.fixture
def many_open_descriptors() -> Iterator[None]:
    """Those of connections to many ranks: the next ones have high numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SELECT_LIMIT), hard))
    opened: list[int] = []
    while not opened or opened[-1] < SELECT_LIMIT:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_descriptors")
def test_a_rank_with_many_connections_writes_its_part(tmp_path: Path) -> None:
    client, path = WriterClient(), tmp_path / "rank_00000.bin"
    client.memory.reuse_or_grow(8, torch.device("cpu"))[:8] = 7
    client.begin_write(path, 8, [])
    wait_for(lambda: client.poll_write(1.0))
    client.close()
    assert path.read_bytes()[:8] == b"\7" * 8

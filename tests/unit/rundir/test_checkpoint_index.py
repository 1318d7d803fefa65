"""The index of a checkpoint: what cannot be read is refused."""

from pathlib import Path

import pytest

from areal_hpc.errors import ShardError
from areal_hpc.rundir.checkpoints import CHECKPOINT_INDEX_FILE, read_checkpoint_index


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"format": 3, "everything": "else"}', "format 3; this version reads format 2"),
        (b'{"format": 2}', "cannot be read"),
        (b"\xff", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / CHECKPOINT_INDEX_FILE).write_bytes(content)
    with pytest.raises(ShardError, match=said):
        read_checkpoint_index(tmp_path)

import os
from pathlib import Path

import numpy as np
import pytest

from areal_hpc.shards.disk_io import Buffer, write_all
from tests.support.full_disk import full_disk


def test_buffers_of_any_type_lie_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    buffers: list[Buffer] = [b"ab", np.array([], "<i4"), np.array([1, 2], "<i4"), memoryview(b"c")]
    assert write_all(descriptor, buffers) == 11
    assert write_all(descriptor, [b"X"] * 3000, offset=20) == 3000
    os.close(descriptor)
    start = b"ab\x01\0\0\0\x02\0\0\0c"
    assert path.read_bytes() == start.ljust(20, b"\0") + b"X" * 3000


def test_a_write_that_the_kernel_shortens_goes_on_where_it_stopped() -> None:
    # Linux takes less than 2 GiB at a time. Zeros that nobody touches need no memory.
    most_bytes = 0x7FFFF000
    content = np.zeros(most_bytes + 12345, np.uint8)
    descriptor = os.open("/dev/null", os.O_WRONLY)
    assert os.writev(descriptor, [content.data]) == most_bytes
    assert write_all(descriptor, [b"head", content, b"tail"]) == len(content) + 8
    os.close(descriptor)


def test_what_does_not_fit_is_an_error_even_when_some_of_it_did(tmp_path: Path) -> None:
    path = tmp_path / "file"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        write_all(descriptor, [b"x" * 60, b"y" * 60])
    os.close(descriptor)
    assert path.stat().st_size == 100

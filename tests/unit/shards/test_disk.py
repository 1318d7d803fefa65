import os
import resource
import signal
from pathlib import Path

import numpy as np

from areal_hpc.shards.disk_io import Buffer, write_all


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
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        try:
            write_all(os.open(path, os.O_WRONLY | os.O_CREAT), [b"x" * 60, b"y" * 60])
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert path.stat().st_size == 100

"""When a process may be forked, and under which command line it is seen."""

import threading
from pathlib import Path

from areal_hpc.jobs.fork_server import is_fork_safe


def test_neither_a_thread_nor_an_open_gpu_may_be_copied(tmp_path: Path) -> None:
    device = tmp_path / "nvidia-uvm"
    device.touch()
    assert is_fork_safe(tmp_path)
    with device.open():
        assert not is_fork_safe(tmp_path), "CUDA was initialized"
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert not is_fork_safe(tmp_path)
    go_on.set()
    thread.join()
    assert is_fork_safe(tmp_path)

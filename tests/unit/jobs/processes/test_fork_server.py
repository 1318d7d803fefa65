"""When a process may be forked."""

import sys
from pathlib import Path

from tests.support.commands import run_program, said_by

LOOK = """
import sys, threading
from pathlib import Path
from areal_hpc.jobs.processes.fork_server import is_fork_safe

folder = Path(sys.argv[1])
found = [is_fork_safe(folder)]
with (folder / "nvidia-uvm").open():
    found.append(is_fork_safe(folder))
go_on = threading.Event()
thread = threading.Thread(target=go_on.wait)
thread.start()
found.append(is_fork_safe(folder))
go_on.set()
thread.join()
found.append(is_fork_safe(folder))
print(found)
"""


def test_neither_a_thread_nor_an_open_gpu_may_be_copied(tmp_path: Path) -> None:
    (tmp_path / "nvidia-uvm").touch()
    # In a process of its own: this one has threads of other tests.
    said = said_by(run_program(sys.executable, "-c", LOOK, tmp_path))
    assert said == "[True, False, False, True]\n"

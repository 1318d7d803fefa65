"""Processes of a job: their start, the report of their end, and restarts of ranks."""

import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areal_hpc.jobs.restarts import RankRestart, RankRestartNotes
from areal_hpc.jobs.task_processes import ManagedProcess
from areal_hpc.rundir.jobs import ProcessSpec
from tests.support.commands import run_program, said_by

LOG_BYTES = 64 << 20


def test_the_end_of_a_long_log_is_told_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    with log.open("wb") as stream:
        stream.truncate(LOG_BYTES)
        stream.seek(LOG_BYTES)
        stream.write(b"\n" + b"".join(b"line %d\n" % number for number in range(20)))
    process = ManagedProcess(ProcessSpec("driver", "agents", "a:b", {}), log, tmp_path / "d.json")
    tracemalloc.start()
    last_words = process.read_last_words()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last_words.splitlines() == [f"line {number}" for number in range(8, 20)]
    assert peak_bytes < LOG_BYTES / 16
    log.write_text("Killed\n")
    assert process.read_last_words() == "Killed"


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
    # In a separate process, since this one has threads of other tests.
    output = said_by(run_program(sys.executable, "-c", LOOK, tmp_path))
    assert output == "[True, False, False, True]\n"


def test_of_many_that_died_one_is_the_cause_and_all_follow_it(tmp_path: Path) -> None:
    tasks = [RankRestartNotes(tmp_path / "7.0", 0.0) for _ in range(8)]
    assert [task.read_next_restart() for task in tasks] == [None] * 8
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(task.announce_restart, RankRestart(rank, 137, 1))
            for rank, task in enumerate(tasks)
        ]
    (cause,) = [rank for rank, future in enumerate(futures) if future.result()]
    assert [task.read_next_restart() for task in tasks] == [RankRestart(cause, 137, 1)] * 8
    assert [task.read_next_restart() for task in tasks] == [None] * 8, "each is followed once"
    assert tasks[0].announce_restart(RankRestart(0, 139, 2)), "and may be followed by another"
    assert tasks[5].read_next_restart() == RankRestart(0, 139, 2)


def test_another_start_of_the_job_has_notes_of_its_own(tmp_path: Path) -> None:
    assert RankRestartNotes(tmp_path / "7.0", 0.0).announce_restart(RankRestart(0, 137, 1))
    assert RankRestartNotes(tmp_path / "7.1", 0.0).read_next_restart() is None


def test_a_healthy_tasks_storage_is_not_asked_all_the_time(tmp_path: Path) -> None:
    notes = RankRestartNotes(tmp_path, 3600.0)
    assert notes.read_next_restart() is None
    assert notes.announce_restart(RankRestart(1, 137, 1))
    assert notes.read_next_restart() is None, "it looked a moment ago"
    assert notes.read_next_restart(is_urgent=True) == RankRestart(1, 137, 1)

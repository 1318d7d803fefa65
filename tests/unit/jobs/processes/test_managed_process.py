"""What a supervisor tells of a process that left no error of ours."""

import tracemalloc
from pathlib import Path

from areal_hpc.jobs.task_processes import ManagedProcess
from areal_hpc.rundir.jobs import ProcessSpec

LOG_BYTES = 64 << 20


def test_the_end_of_a_long_log_is_told_without_reading_all_of_it(tmp_path: Path) -> None:
    log = tmp_path / "driver.log"
    with log.open("wb") as stream:
        stream.truncate(LOG_BYTES)
        stream.seek(LOG_BYTES)
        stream.write(b"\n" + b"".join(b"line %d\n" % number for number in range(20)))
    process = ManagedProcess(ProcessSpec("driver", "agents", "a:b", {}), log, tmp_path / "d.json")
    tracemalloc.start()
    told = process.read_last_words()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert told.splitlines() == [f"line {number}" for number in range(8, 20)]
    assert peak_bytes < LOG_BYTES / 16
    log.write_text("Killed\n")
    assert process.read_last_words() == "Killed"

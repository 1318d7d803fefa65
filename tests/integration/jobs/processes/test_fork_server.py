"""Real processes that are forked by a fork server, under a real submitit job."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from areal_hpc.jobs.supervisor import run_task
from areal_hpc.rundir.jobs import (
    STOPPED_EXIT_CODE,
    JobSpec,
    LaunchFile,
    ProcessSpec,
    TaskExit,
)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.slurm.submit import LocalJobHandle, stop_jobs, submit_local
from tests.support.deadlines import scaled
from tests.support.process_commands import alive, command_of
from tests.support.waiting import wait_for

ENTRIES = """
import os, signal, sys, threading, time
from pathlib import Path
from areal_hpc.errors import LostTrainerRankError, RecipeError

IMPORTED_BY = os.getpid()

def note(config, text):
    with Path(config["file"]).open("a") as stream:
        stream.write(f"{text}\\n")

def begin(config):
    print("a line of", os.getpid(), flush=True)
    note(config, f"{os.environ['AREAL_HPC_RANK']} {os.getpid()} {os.getppid()} {IMPORTED_BY}")

def wait(config):
    def stop(number, frame):
        note(config, f"stopped {os.getpid()}")
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, stop)
    begin(config)
    time.sleep(600)

def crash(config):
    begin(config)
    os.kill(os.getpid(), signal.SIGSEGV)

def refuse(config):
    begin(config)
    raise RecipeError("the shoe does not fit")

def fail_once(config):
    begin(config)
    dead = Path(config["file"]).with_name("dead")
    is_first_start = not dead.exists()
    if os.environ["AREAL_HPC_RANK"] == "1" and is_first_start:
        while len(Path(config["file"]).read_text().splitlines()) < 3:
            time.sleep(0.01)
        dead.touch()
        time.sleep(0.5)  # the others have ended long before
        os.kill(os.getpid(), signal.SIGKILL)
    if not is_first_start:
        return
    while not dead.exists():
        time.sleep(0.01)
    if os.environ["AREAL_HPC_RANK"] == "0":
        raise LostTrainerRankError("another trainer rank disappeared")
    time.sleep(600)  # in a collective that does not notice

def fail_always(config):
    begin(config)
    dying = Path(config["file"]).with_name("dying")
    before = dying.read_text() if dying.exists() else ""
    if os.environ["AREAL_HPC_RANK"] == "1":
        time.sleep(0.5)
        dying.write_text(before + "x")
        os.kill(os.getpid(), signal.SIGKILL)
    while not dying.exists() or dying.read_text() == before:
        time.sleep(0.01)
    raise LostTrainerRankError("another trainer rank disappeared")
"""


class ForkedJob:
    """A job of tasks that each have one forked process."""

    def __init__(self, folder: Path, function: str, tasks: int, **options: object) -> None:
        self.folder = folder
        self._words = folder / "words.txt"
        # isort: off
        spec = ProcessSpec(
            "p", "agents", f"entries:{function}", {"file": str(self._words)},
            is_forked=True, ends_job=True, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        launch = LaunchFile(
            job=JobSpec("job", "agents", [spec], tasks=tasks),
            job_dir=str(folder / "job"),
            log_dir=str(folder / "logs"),
            events=str(folder / "events.jsonl"),
            pythons={"agents": sys.executable},
            variables={"agents": {"PYTHONPATH": str(folder)}},
            stop_grace_s=scaled(5.0),
        )
        self.handle: LocalJobHandle = submit_local(launch, run_task)

    def words(self) -> list[str]:
        return self._words.read_text().splitlines() if self._words.exists() else []

    def starts(self) -> list[tuple[int, ...]]:
        """Task, process, its parent and whoever imported its module, of every start."""
        rows = [word.split() for word in self.words() if word[0].isdigit()]
        return [tuple(map(int, row)) for row in rows]

    def await_starts(self, count: int) -> list[tuple[int, ...]]:
        wait_for(lambda: len(self.starts()) >= count, why=self.logs)
        return self.starts()

    def await_exits(self) -> list[TaskExit]:
        wait_for(self.handle.is_done, why=self.logs)
        return self.handle.read_task_exits()

    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("logs/job/*.log")))

    def died(self) -> list[int]:
        """Exit codes of the processes that were the cause of something."""
        rows = read_readable_records(self.folder / "events.jsonl")
        return [row["exit_code"] for row in rows if row["event"] == "process_exited"]


class Jobs:
    """Starts jobs, which end with the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.handles: list[LocalJobHandle] = []
        (folder / "entries.py").write_text(ENTRIES)

    def submit(self, function: str, tasks: int = 1, **options: object) -> ForkedJob:
        job = ForkedJob(self._folder, function, tasks, **options)
        self.handles.append(job.handle)
        return job


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path)
    yield jobs
    stop_jobs(jobs.handles, 10.0)


def test_every_start_is_forked_from_one_process_that_imported_the_entry(jobs: Jobs) -> None:
    job = jobs.submit("crash", restarts=1)
    (exit_status,) = job.await_exits()
    assert exit_status.exit_code == 128 + signal.SIGSEGV
    assert job.died() == [128 + signal.SIGSEGV] * 2
    (_, first, server, _), (_, second, _, _) = job.starts()
    assert job.starts() == [(0, first, server, server), (0, second, server, server)]
    lines = [line for line in job.logs().splitlines() if line.startswith("a line of")]
    assert lines == [f"a line of {first}", f"a line of {second}"]


def test_an_error_of_a_forked_process_is_passed_on(jobs: Jobs) -> None:
    (exit_status,) = jobs.submit("refuse", restarts=5).await_exits()
    assert (exit_status.exit_code, exit_status.reason) == (78, "the shoe does not fit")


def test_a_stop_reaches_the_process_and_nothing_is_left(jobs: Jobs) -> None:
    job = jobs.submit("wait")
    ((_, pid, server, _),) = job.await_starts(1)
    processes = [psutil.Process(pid), psutil.Process(server)]
    own, servers = map(command_of, processes)
    assert own[1:4] == ["-m", "areal_hpc.jobs.processes.process_main", "entries:wait"]
    assert "areal_hpc.jobs.processes.fork_server" in servers
    os.kill(server, signal.SIGTERM)  # as Slurm tells every process of a step: not for the server
    stop_jobs([job.handle], 10.0)
    assert job.words()[1:] == [f"stopped {pid}"]
    assert alive(processes) == []


def test_a_killed_fork_server_is_replaced_and_its_process_with_it(jobs: Jobs) -> None:
    job = jobs.submit("wait", restarts=1)
    ((_, pid, server, _),) = job.await_starts(1)
    old = psutil.Process(pid)
    os.kill(server, signal.SIGKILL)
    *_, (_, _, new_server, _) = job.await_starts(2)
    assert new_server != server
    wait_for(lambda: alive([old]) == [])
    assert job.died() == [128 + signal.SIGKILL]


def test_killing_the_supervisor_leaves_neither_server_nor_process(jobs: Jobs) -> None:
    job = jobs.submit("wait")
    ((_, pid, server, _),) = job.await_starts(1)
    processes = [psutil.Process(pid), psutil.Process(server)]
    processes[1].parent().kill()
    wait_for(lambda: alive(processes) == [])


def test_where_fork_is_unsafe_the_process_is_executed(jobs: Jobs, tmp_path: Path) -> None:
    module = tmp_path / "entries.py"
    thread = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    module.write_text(module.read_text() + thread)
    job = jobs.submit("wait")
    ((_, pid, server, imported_by),) = job.await_starts(1)
    assert (pid, psutil.Process(pid).ppid()) == (imported_by, server)
    stop_jobs([job.handle], 10.0)
    assert job.words()[1:] == [f"stopped {pid}"]


def test_the_death_of_one_rank_starts_all_again_and_is_counted_once(jobs: Jobs) -> None:
    job = jobs.submit("fail_once", tasks=3, restarts=1, is_rank=True)
    exits = job.await_exits()
    assert [one.exit_code for one in exits] == [0, 0, 0], job.logs()
    starts = job.starts()
    assert sorted(task for task, *_ in starts) == [0, 0, 1, 1, 2, 2]
    assert len({server for _, _, server, _ in starts}) == 3, "a fork server a task"
    # Task 0 had ended first, but only because of task 1.
    assert job.died() == [128 + signal.SIGKILL]
    (event,) = (
        row
        for row in read_readable_records(job.folder / "events.jsonl")
        if row["event"] == "ranks_restarted"
    )
    assert event["failures"] == 1


def test_ranks_that_get_no_further_end_the_job_with_the_cause(jobs: Jobs) -> None:
    job = jobs.submit("fail_always", tasks=2, restarts=2, is_rank=True)
    exits = job.await_exits()
    assert [one.exit_code for one in exits] == [STOPPED_EXIT_CODE, 128 + signal.SIGKILL]
    assert [task for task, *_ in job.starts()].count(1) == 3
    assert job.died() == [128 + signal.SIGKILL] * 3


def test_progress_cancels_the_deaths_before_it(jobs: Jobs, tmp_path: Path) -> None:
    progress = tmp_path / "metrics.jsonl"
    progress.touch()
    job = jobs.submit("wait", tasks=2, restarts=1, is_rank=True, progress=str(progress))
    for round_ in range(1, 4):
        starts = job.await_starts(2 * round_)
        with progress.open("a") as stream:
            stream.write("a step\n")
        (pid,) = (pid for task, pid, *_ in starts[-2:] if task == 1)
        os.kill(pid, signal.SIGKILL)
    job.await_starts(8)
    assert job.died() == [128 + signal.SIGKILL] * 3

"""Real processes of a real submitit job, forked or not, restart and stop, and none survives."""

import fcntl
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.slurm.submit import LocalJobHandle, stop_jobs, submit_local
from tests.support.commands import exit_code_of
from tests.support.deadlines import scaled
from tests.support.process_commands import alive, command_of, is_running
from tests.support.waiting import wait_for

ACTORS = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from areal_hpc.errors import RecipeError

def finish(config):
    Path(config["file"]).write_text("done")

def finish_after_w(config):
    w = Path(config["file"]).with_name("w.txt")
    while not (w.exists() and w.read_text()):
        time.sleep(0.02)

def wait(config):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    Path(config["file"]).write_text(str(os.getpid()))
    time.sleep(600)

def ignore_requests(config):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    wait(config)

def crash_until(config):
    path = Path(config["file"])
    starts = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(starts))
    if starts <= config["crashes"]:
        os.kill(os.getpid(), signal.SIGKILL)

def refuse(config):
    path = Path(config["file"])
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    raise RecipeError("the shoe does not fit", key="shoe.size", hint="use a larger one")

def tell(config):
    words = [os.environ["SHARED"], os.environ["KEY"]]
    Path(config["file"]).write_text(" ".join(words))

def stubborn(config):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(config["file"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "actors.py").write_text(ACTORS)
    return tmp_path


Submit = Callable[..., LocalJobHandle]


@pytest.fixture
def submit(folder: Path) -> Iterator[Submit]:
    handles: list[LocalJobHandle] = []

    def submit_processes(
        *processes: ProcessSpec, name: str = "job", grace_s: float = 3.0, **options: Any
    ) -> LocalJobHandle:
        launch = LaunchFile(
            job=JobSpec(name, "agents", list(processes), tasks=options.pop("tasks", 1)),
            job_dir=str(RunPaths(folder).job(name).root),
            log_dir=str(RunPaths(folder).log_dir(1)),
            events=str(folder / "events.jsonl"),
            pythons={"agents": sys.executable},
            variables={"agents": {"PYTHONPATH": str(folder), "SHARED": "of-all", "KEY": "of-all"}},
            stop_grace_s=grace_s,
            **options,
        )
        handles.append(submit_local(launch, run_task))
        return handles[-1]

    yield submit_processes
    stop_jobs(handles, 5.0)


def actor(folder: Path, name: str, function: str, **options: object) -> ProcessSpec:
    config = {"file": str(folder / f"{name}.txt"), "crashes": options.pop("crashes", 0)}
    return ProcessSpec(name, "agents", f"actors:{function}", config, **options)  # type: ignore[arg-type]


def outcome_of(job: LocalJobHandle) -> TaskExit:
    wait_for(job.is_done)
    (outcome,) = job.read_task_exits()
    return outcome


def pids_in(path: Path) -> list[int]:
    wait_for(lambda: path.exists() and path.read_text() != "")
    return [int(word) for word in path.read_text().split()]


def test_the_job_ends_with_its_leading_process(folder: Path, submit: Submit) -> None:
    job = submit(actor(folder, "w", "wait"), actor(folder, "f", "finish_after_w", ends_job=True))
    outcome = outcome_of(job)
    assert (outcome.exit_code, outcome.process) == (0, "f")
    assert not any(is_running(pid) for pid in pids_in(folder / "w.txt"))


def test_stacks_of_waiting_processes_are_shown_and_a_process_without_a_handler_lives_on(
    folder: Path, submit: Submit, capsys: pytest.CaptureFixture[str]
) -> None:
    RunPaths(folder).recipe.write_text("trainer: {}")
    processes = [
        actor(folder, name, "wait", is_forked=name == "forked") for name in ("w", "forked")
    ]
    submit(*processes, actor(folder, "deaf", "ignore_requests"))
    pids = [pid for name in ("w", "forked", "deaf") for pid in pids_in(folder / f"{name}.txt")]
    time.sleep(scaled(3))  # the supervisor has looked once
    assert exit_code_of("stacks", folder, "jobb") == 78
    assert capsys.readouterr().err == (
        "error: attempt 1 has no log of jobb\n  try: choose from job\n"
    )
    assert not RunPaths(folder).job("job").stack_request.exists()
    assert exit_code_of("stacks", folder, "job") == 0
    output = capsys.readouterr().out
    for name in ("w", "forked"):
        frames = re.findall(rf'job/{name} \|   File ".*/(\w+)\.py", line \d+ in wait', output)
        assert frames == ["actors", "threading", "threading"], output
    assert "job/deaf" not in output
    assert all(map(is_running, pids))


def test_a_job_is_started_outside_the_main_thread_too(folder: Path, submit: Submit) -> None:
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(submit, actor(folder, "f", "finish", ends_job=True)).result()
    assert outcome_of(job).exit_code == 0


def test_what_may_be_secret_is_read_from_the_recipe(folder: Path, submit: Submit) -> None:
    recipe = RunPaths(folder).recipe
    roles = {role: {"variables": {"KEY": f"key-of-{role}"}} for role in ROLES}
    recipe.write_text(json.dumps({"cluster": roles}))
    spec = actor(folder, "t", "tell", ends_job=True)
    job = submit(spec, recipe=str(recipe))
    assert outcome_of(job).exit_code == 0
    assert (folder / "t.txt").read_text() == "of-all key-of-agents"
    recipe.unlink()
    refused = outcome_of(submit(spec, name="job-without", recipe=str(recipe)))
    assert refused.exit_code == 75
    assert "the run's recipe cannot be read" in refused.reason


def test_crashes_are_retried_and_mistakes_of_the_user_never(folder: Path, submit: Submit) -> None:
    allowed = actor(folder, "c", "crash_until", crashes=2, restarts=3, ends_job=True)
    too_many = actor(folder, "d", "crash_until", crashes=9, restarts=1, ends_job=True)
    mistaken = actor(folder, "r", "refuse", restarts=5)
    jobs = [submit(spec, name=f"job-{spec.name}") for spec in (allowed, too_many, mistaken)]
    recovered, failed, refused = map(outcome_of, jobs)
    assert (recovered.exit_code, (folder / "c.txt").read_text()) == (0, "3")
    events = read_readable_records(folder / "events.jsonl")
    exits = [event["process"] for event in events if event["event"] == "process_exited"]
    assert exits.count("c") == 2
    assert failed.exit_code == 128 + signal.SIGKILL
    assert failed.log.endswith("d.log")
    assert refused.exit_code == 78
    assert refused.reason == "the shoe does not fit\n  at: shoe.size\n  try: use a larger one"
    assert (folder / "r.txt").read_text() == "x"


def test_only_the_first_task_runs_first_task_processes(folder: Path, submit: Submit) -> None:
    job = submit(
        actor(folder, "only", "finish", tasks="first"),
        actor(folder, "all", "finish", ends_job=True),
        tasks=2,
    )
    wait_for(job.is_done)
    assert len(job.read_task_exits()) == 2
    logs = sorted(path.name for path in (RunPaths(folder).log_dir(1) / "job").iterdir())
    assert logs == ["all-0.log", "all-1.log", "only-0.log"]


def test_a_stop_ends_processes_that_ignore_it_with_children(folder: Path, submit: Submit) -> None:
    job = submit(actor(folder, "s", "stubborn"), grace_s=1.0)
    pids = pids_in(folder / "s.txt")
    patience_s, began = scaled(60.0), time.monotonic()
    stop_jobs([job], patience_s)
    assert time.monotonic() - began < patience_s
    assert not any(is_running(pid) for pid in pids)


def test_a_second_request_waits_for_nobody(folder: Path, submit: Submit) -> None:
    job = submit(actor(folder, "s", "stubborn"), grace_s=scaled(600.0))
    pids = pids_in(folder / "s.txt")
    stop_jobs([job], scaled(600.0), is_urgent=lambda: True)
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_killing_the_supervisor_leaves_no_process(folder: Path, submit: Submit) -> None:
    submit(actor(folder, "w", "wait"))
    (pid,) = pids_in(folder / "w.txt")
    os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
    wait_for(lambda: not is_running(pid))


def test_the_job_stops_when_the_launcher_vanishes(folder: Path, submit: Submit) -> None:
    lock = folder / "lock"
    with lock.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        job = submit(actor(folder, "w", "wait"), launcher_lock=str(lock))
        (pid,) = pids_in(folder / "w.txt")
        time.sleep(0.5)
        assert is_running(pid)
    assert outcome_of(job).reason == "the launcher is gone"
    assert not is_running(pid)


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
    """Job of tasks that each have one forked process."""

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
        """Return task, process, parent and importer of the module for every start."""
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
        """Return the exit codes of the processes that caused a failure."""
        rows = read_readable_records(self.folder / "events.jsonl")
        return [row["exit_code"] for row in rows if row["event"] == "process_exited"]


class Jobs:
    """Starter of jobs that end with the test."""

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
    os.kill(server, signal.SIGTERM)  # as Slurm signals every process of a step
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
    assert [end.exit_code for end in exits] == [0, 0, 0], job.logs()
    starts = job.starts()
    assert sorted(task for task, *_ in starts) == [0, 0, 1, 1, 2, 2]
    assert len({server for _, _, server, _ in starts}) == 3, "a fork server a task"
    # Task 0 ended first, but only because of task 1.
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
    assert [end.exit_code for end in exits] == [STOPPED_EXIT_CODE, 128 + signal.SIGKILL]
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

"""Real processes under a real submitit job: restarts, stops, and nothing left behind."""

import fcntl
import json
import os
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
    JobSpec,
    LaunchFile,
    ProcessSpec,
    TaskExit,
)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.slurm.submit import LocalJobHandle, stop_jobs, submit_local
from tests.support.deadlines import scaled
from tests.support.waiting import wait_for

ACTORS = """
import os, signal, subprocess, sys, time
from pathlib import Path
from areal_hpc.errors import RecipeError

def finish(config):
    Path(config["file"]).write_text("done")

def finish_after_w(config):
    w = Path(config["file"]).with_name("w.txt")
    while not (w.exists() and w.read_text()):
        time.sleep(0.02)

def wait(config):
    Path(config["file"]).write_text(str(os.getpid()))
    time.sleep(600)

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
            job_dir=str(folder / name),
            log_dir=str(folder / "logs"),
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


def is_running(pid: int) -> bool:
    """False for a process that is gone, or dead and not yet collected by init."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


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
    logs = sorted(path.name for path in (folder / "logs" / "job").iterdir())
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
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        job = submit(actor(folder, "w", "wait"), launcher_lock=str(lock))
        (pid,) = pids_in(folder / "w.txt")
        time.sleep(0.5)
        assert is_running(pid)
    assert outcome_of(job).reason == "the launcher is gone"
    assert not is_running(pid)

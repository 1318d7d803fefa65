"""Processes of jobs, started as a supervisor starts them, and command lines of processes."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Read a process's command line; empty if it has ended or belongs to another user."""
    try:
        words: list[str] = process.cmdline()
        return words
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # zombies are a kind of the former
        return []


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Select processes that still run (a container's first process may leave the dead unburied)."""
    return [process for process in processes if process.is_running() and not _has_ended(process)]


def _has_ended(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def is_running(pid: int) -> bool:
    try:
        return not _has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def is_scheduler(process: psutil.Process) -> bool:
    return " ".join(command_of(process)).startswith("sglang::scheduler")


def start_job_process(
    entry: str,
    config_path: Path,
    log: Path,
    *,
    max_open_files: int = 0,
    python: Path = Path(sys.executable),
    environ: Mapping[str, str] = os.environ,
) -> subprocess.Popen[bytes]:
    """Start a process of a job, whose supervisor is this process; its output is logged.

    Its administrator allows so many open files, if a number is given.
    """
    limit = f"ulimit -n {max_open_files}; " if max_open_files else ""
    with log.open("ab") as log_file:
        return subprocess.Popen(
            [
                *("sh", "-c", f'{limit}exec "$@"', "sh", str(python)),
                *("-m", "areal_hpc.jobs.processes.process_main", entry, str(config_path)),
            ],
            env={**environ, "AREAL_HPC_SUPERVISOR_PID": str(os.getpid())},
            stdout=log_file,
            stderr=subprocess.STDOUT,
        )


def find_processes(*parts: object, in_environment: bool = False) -> list[psutil.Process]:
    """Find live processes, but for this one, with all parts in command line (or environment)."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if (known := command_of(process)) and process.pid != os.getpid():
                known += process.environ().values() if in_environment else ()
                text = " ".join(known)
                if all(str(part) in text for part in parts):
                    processes.append(process)
    return processes

"""Background processes identified by pid and start time."""

import contextlib
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from areal_hpc.errors import ClusterError

MAX_KILL_S = 10.0
"""A killed process that is still there after this hangs in the kernel."""

COMMAND_TIMEOUT_S = 60.0
"""Making an empty database takes seconds; clients of a lost daemon try again for a while."""


def get_search_path() -> str:
    return os.pathsep.join(
        [os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"]
    )


def spawn_and_record(
    command: Sequence[str],
    environ: Mapping[str, str],
    output: Path,
    record: Path,
    stdin: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start `command` in a session of its own and write down which process it is.

    `output` is appended to.
    """
    with output.open("ab") as sink:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PATH": get_search_path(), **environ},
            cwd=output.parent,
            stdin=stdin,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # It may have ended already: then there is nobody to find later either.
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).create_time()
        record.write_text(json.dumps({"pid": process.pid, "started": started}))
    return process


def run_command_unchecked(
    command: Sequence[str], environ: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a short command to its end, whatever its exit code."""
    return subprocess.run(
        command,
        env={**os.environ, "PATH": get_search_path(), **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=COMMAND_TIMEOUT_S,
    )


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Be the only one on this machine that holds the lock of this folder; wait for it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def find_recorded_process(record: Path) -> psutil.Process | None:
    """The process that `spawn_and_record` wrote down, if it still runs."""
    try:
        kept = json.loads(record.read_text())
        process = psutil.Process(kept["pid"])
        return (
            process if process.create_time() == kept["started"] and _is_running(process) else None
        )
    except (FileNotFoundError, psutil.NoSuchProcess):
        return None


def list_running_descendants(process: psutil.Process) -> list[psutil.Process]:
    """All processes that descend from `process` and still run."""
    try:
        children = process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child for child in children if _is_running(child)]


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_tree(process: psutil.Process) -> None:
    """Kill everything that descends from `process`, then `process`."""
    deadline = time.monotonic() + MAX_KILL_S
    # In rounds, because they may fork meanwhile; the ancestor last, because it adopts.
    while remaining := list_running_descendants(process):
        for child in remaining:
            _kill_process(child)
        _sleep_or_time_out(deadline, remaining)
    _kill_process(process)
    while _is_running(process):
        _sleep_or_time_out(deadline, [process])


def terminate(process: psutil.Process, grace_s: float) -> None:
    """Ask `process` to end; kill it after `grace_s`."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
    deadline = time.monotonic() + grace_s
    while _is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    if _is_running(process):
        kill_tree(process)


def _kill_process(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _sleep_or_time_out(deadline: float, remaining: Sequence[psutil.Process]) -> None:
    if time.monotonic() > deadline:
        raise ClusterError(
            f"expected killed processes to be gone after {MAX_KILL_S:.0f} s, got "
            f"{', '.join(str(process.pid) for process in remaining)} still there",
            hint="look at their state with ps; one in state D waits for a device",
        )
    time.sleep(0.02)

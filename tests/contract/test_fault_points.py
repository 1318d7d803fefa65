"""Faults strike at their points alone, dead threads end a process, a full disk is reported."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from areal_hpc.errors import ClusterError
from areal_hpc.rundir.jobs import JobSpec, LaunchFile, ProcessSpec, SlurmLaunchInfo, read_task_exits
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.wire.fault_points import FaultInjector, parse_faults
from tests.support.commands import run_program
from tests.support.deadlines import scaled
from tests.support.scripted_slurm import ScriptedSlurm
from tests.support.waiting import wait_for


@pytest.mark.parametrize(
    "text", ["proxy.generate", "proxy.generate@0=kill", "proxy.generate=die", "nowhere=kill"]
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected POINT\[@N\]=kill, error or hold:FILE"):
        parse_faults(text)


def test_a_process_kills_itself_at_the_visit_that_is_named() -> None:
    program = (
        "from areal_hpc.wire.fault_points import fault_point\n"
        "while not fault_point('proxy.generate'): print()"
    )
    environ = {**os.environ, "AREAL_HPC_FAULTS": "proxy.generate@3=kill"}
    ended = run_program(sys.executable, "-uc", program, environ=environ)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "\n\n")


def test_an_error_is_raised_at_the_point_alone() -> None:
    injector = FaultInjector(parse_faults("shard.before_read@2=error"))
    for point in ("shard.before_read", "shard.before_index", "shard.before_index"):
        injector.trigger_due_faults(point)
    with pytest.raises(OSError, match=r"a fault at shard\.before_read") as caught:
        injector.trigger_due_faults("shard.before_read")
    assert caught.value.errno == errno.EIO


def test_the_first_that_comes_is_held_while_the_file_is_there(tmp_path: Path) -> None:
    gate, held_mark = tmp_path / "gate", tmp_path / "gate.held"
    injector = FaultInjector(parse_faults(f"proxy.generate=hold:{gate}"))
    injector.trigger_due_faults("proxy.generate")
    assert not held_mark.exists()
    gate.touch()
    first = threading.Thread(target=injector.trigger_due_faults, args=("proxy.generate",))
    first.start()
    wait_for(lambda: held_mark.exists() and held_mark.read_text() == str(os.getpid()))
    injector.trigger_due_faults("proxy.generate")
    assert first.is_alive()
    gate.unlink()
    first.join(scaled(10))
    assert not first.is_alive()


PROGRAM = """
import atexit, sys
from areal_hpc.jobs.processes.native_call_threads import (
    exit_beside_native_calls,
    mark_native_threads_ended,
    note_library_threads,
)

atexit.register(print, "the interpreter's end")
with exit_beside_native_calls():
    note_library_threads("torch.distributed")
    if sys.argv[1] == "stops":
        sys.exit(80)
    if sys.argv[1] == "fails":
        raise ValueError("no traceback is lost")
    if sys.argv[1] == "ends":
        mark_native_threads_ended("torch.distributed")
"""


@pytest.mark.parametrize(
    ("how", "code", "out", "err"),
    [
        ("ends", 0, "the interpreter's end\n", ""),
        ("leaves them", 0, "", ""),
        ("stops", 80, "", ""),
        ("fails", 1, "", "ValueError: no traceback is lost"),
    ],
)
def test_an_interpreter_ends_as_its_threads_did(how: str, code: int, out: str, err: str) -> None:
    ended = run_program(sys.executable, "-c", PROGRAM, how)
    assert (ended.returncode, ended.stdout) == (code, out), ended.stderr
    assert err in ended.stderr


TASK = "import sys; from areal_hpc.jobs.supervisor import run_task; run_task(sys.argv[1])"
TOLD = {"JOB_ID": "7", "PROCID": "0", "NTASKS": "1", "LOCALID": "0", "NODEID": "0"}


def test_a_job_that_cannot_write_requeues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in place of a file takes no content, as on a full disk."""
    slurm = ScriptedSlurm(tmp_path, monkeypatch)
    slurm.state = "RUNNING"
    slurm.answer_about_jobs("requeue) echo PENDING > $STATE")
    paths = RunPaths(tmp_path / "run")
    files = paths.job("trainer")
    (files.process_config("trainer") / "in the way").mkdir(parents=True)
    launch = LaunchFile(
        JobSpec("trainer", "train", [ProcessSpec("trainer", "train", "none:none", {})]),
        job_dir=str(files.root),
        log_dir=str(paths.log_dir(1)),
        events=str(paths.events),
        pythons={"train": sys.executable},
        stop_grace_s=0.1,
        slurm=SlurmLaunchInfo(least_free_bytes=1, margin_s=0.1),
    )
    files.launch.write_bytes(msgspec.json.encode(launch))
    others = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    environ = {f"SLURM_{name}": value for name, value in TOLD.items()}
    command = [sys.executable, "-c", TASK, str(files.launch)]
    ended = subprocess.run(
        command,
        env={**others, **environ, "SLURMD_NODENAME": "n01"},
        check=False,
        timeout=scaled(60),
    )
    assert ended.returncode == ClusterError.exit_code
    reason = read_task_exits(files)[0].reason
    assert reason.startswith("the task could not start: ")
    assert reason.endswith("quota and permissions of the run directory (requeued)")
    assert slurm.list_calls("scontrol requeue") == ["scontrol requeue 7"]

"""Faults that the variable names strike at their points, and at no others."""

import errno
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from areal_hpc.wire.fault_points import FaultInjector, parse_faults
from tests.support.commands import run_program
from tests.support.deadlines import scaled
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
    done = run_program(sys.executable, "-uc", program, environ=environ)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "\n\n")


def test_an_error_is_raised_at_the_point_alone() -> None:
    injector = FaultInjector(parse_faults("shard.before_read@2=error"))
    for point in ("shard.before_read", "shard.before_index", "shard.before_index"):
        injector.trigger_due_faults(point)
    with pytest.raises(OSError, match=r"a fault at shard\.before_read") as caught:
        injector.trigger_due_faults("shard.before_read")
    assert caught.value.errno == errno.EIO


def test_the_first_that_comes_is_held_while_the_file_is_there(tmp_path: Path) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    injector = FaultInjector(parse_faults(f"proxy.generate=hold:{gate}"))
    injector.trigger_due_faults("proxy.generate")
    assert not held.exists()
    gate.touch()
    first = threading.Thread(target=injector.trigger_due_faults, args=("proxy.generate",))
    first.start()
    wait_for(lambda: held.exists() and held.read_text() == str(os.getpid()))
    injector.trigger_due_faults("proxy.generate")
    assert first.is_alive()
    gate.unlink()
    first.join(scaled(10))
    assert not first.is_alive()

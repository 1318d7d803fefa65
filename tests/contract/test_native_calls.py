"""A process that fails beside a library's threads ends at once, with its own exit code."""

import sys

import pytest

from tests.support.commands import run_program

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
    ("how", "code", "said", "told"),
    [
        ("ends", 0, "the interpreter's end\n", ""),
        ("leaves them", 0, "", ""),
        ("stops", 80, "", ""),
        ("fails", 1, "", "ValueError: no traceback is lost"),
    ],
)
def test_the_interpreter_ends_in_order_only_where_the_threads_did(
    how: str, code: int, said: str, told: str
) -> None:
    ended = run_program(sys.executable, "-c", PROGRAM, how)
    assert (ended.returncode, ended.stdout) == (code, said), ended.stderr
    assert told in ended.stderr

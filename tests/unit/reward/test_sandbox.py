"""What a model's program cannot do. Every limit is run into."""

import subprocess
import time
from pathlib import Path

import pytest

from areal_hpc.sandbox.run import ProgramLimits, run_program

SMALL = ProgramLimits(time_s=1.0, memory_bytes=256 << 20, output_bytes=64 << 10, processes=8)


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("print(input()[::-1])", "cba\n"),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n"),
        ("import threading\nx = threading.Thread(target=print, args=(7,)); x.start()", "7\n"),
        # neither the launcher's variables nor its packages are seen
        (
            "import os; print(sorted(os.environ)); print(os.listdir('.'))",
            "['HOME', 'LC_ALL', 'PATH']\n[]\n",
        ),
    ],
)
def test_a_program_may_read_print_write_and_start_threads(source: str, printed: str) -> None:
    outcome = run_program(source, "abc\n")
    assert (outcome.exit_code, outcome.stdout, outcome.timed_out) == (0, printed, False)


def test_an_error_is_told() -> None:
    outcome = run_program("raise ValueError('mine')")
    assert outcome.exit_code == 1
    assert "ValueError: mine" in outcome.stderr


def test_endless_work_is_stopped() -> None:
    began = time.monotonic()
    outcome = run_program("while True: pass", limits=SMALL)
    assert outcome.timed_out
    assert outcome.exit_code != 0
    assert time.monotonic() - began < 30


def test_memory_and_processes_are_limited() -> None:
    bomb = "import os\nfor n in range(100): os.fork() or __import__('time').sleep(9)\nprint('all')"
    for source, error in (
        ("x = bytearray(1 << 30); print('all')", "MemoryError"),
        (bomb, "BlockingIOError"),
    ):
        outcome = run_program(source, limits=SMALL)
        assert error in outcome.stderr
        assert "all" not in outcome.stdout


def test_output_is_limited() -> None:
    outcome = run_program("print('x' * (1 << 20))", limits=SMALL)
    assert len(outcome.stdout) <= SMALL.output_bytes
    assert outcome.exit_code != 0


def namespaces_are_allowed() -> bool:
    """Asked of util-linux, not of our code."""
    probe = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "true"],
        capture_output=True,
        check=False,
    )
    return probe.returncode == 0


def test_there_is_no_network_and_no_other_process_where_the_kernel_allows_it() -> None:
    source = (
        "import os, socket\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "print(os.getpid(), names)\n"
        "socket.create_connection(('127.0.0.1', 9), 1)\n"
    )
    outcome = run_program(source)
    assert outcome.is_apart or not namespaces_are_allowed()
    if outcome.is_apart:
        assert outcome.stdout == "1 ['lo']\n"
        assert "Error" in outcome.stderr


def test_nothing_that_a_program_started_outlives_it() -> None:
    marker = "areal-sandbox-orphan"
    source = (
        "import os, time\n"
        f"if os.fork() == 0:\n    os.execv('/bin/sleep', ['{marker}', '60'])\n"
        "time.sleep(0.2)\n"
    )
    assert run_program(source).exit_code == 0
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if marker.encode() in command]

"""What a model's program cannot do. Every limit is run into."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError, RecipeError, SandboxStartError
from areal_hpc.recipe.sections.reward import ISOLATION_VARIABLE
from areal_hpc.reward.code import passes_tests
from areal_hpc.reward.judging.answer_main import MAX_ITERATED_ITEMS
from areal_hpc.sandbox import bubblewrap_command_line, process
from areal_hpc.sandbox.bubblewrap_command_line import (
    find_bubblewrap,
    make_bwrap_public,
)
from areal_hpc.sandbox.process import Isolation, ProgramLimits, SandboxedProcess, run_program
from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

SMALL = ProgramLimits(
    time_s=scaled(1.0), memory_bytes=256 << 20, output_bytes=64 << 10, processes=8
)


@pytest.mark.parametrize(
    ("source", "printed"),
    [
        ("print(input()[::-1])", "cba\n"),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n"),
        ("import threading\nx = threading.Thread(target=print, args=(7,)); x.start()", "7\n"),
        # neither the launcher's variables nor its packages are seen
        (
            "import os; print(sorted(os.environ)); print(os.listdir('.'))",
            "['HOME', 'LC_ALL', 'PATH', 'PWD']\n[]\n",
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
    outcome = run_program("while True: pass", limits=SMALL)
    assert outcome.timed_out
    assert outcome.exit_code != 0


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


def test_there_is_no_network_no_other_process_and_nothing_of_the_user(tmp_path: Path) -> None:
    secret = tmp_path / "admin.key"
    secret.write_text("key of the run")
    secret.chmod(0o644)
    source = (
        "import os, socket\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "print([name for name in os.listdir('/proc') if name.isdigit()], names, os.getuid())\n"
        f"for path in ({str(secret)!r}, '/etc/passwd', {__file__!r}):\n"
        "    print(os.path.exists(path))\n"
        "socket.create_connection(('127.0.0.1', 9), 1)\n"
    )
    outcome = run_program(source)
    assert outcome.stdout == "['1', '2'] ['lo'] 65534\n" + 3 * "False\n"
    assert "ConnectionRefusedError" in outcome.stderr


@pytest.mark.parametrize(
    "source",
    [
        "open('/usr/planted', 'w')",
        "open('/planted', 'w')",
        "open('/dev/planted', 'w')",
        "open('/sandbox/program.py', 'w')",
        "import os; os.mkdir('/tmp/../planted')",
    ],
)
def test_it_writes_only_into_its_own_folders(source: str) -> None:
    assert "Read-only file system" in run_program(source).stderr


def test_what_it_writes_is_of_limited_size_and_gone_afterwards() -> None:
    limits = ProgramLimits(scratch_bytes=1 << 20, output_bytes=4 << 20)
    for folder in ("/tmp", "/dev/shm"):
        source = f"open('{folder}/large', 'wb').write(bytes(2 << 20))"
        assert "No space left on device" in run_program(source, limits=limits).stderr
    assert run_program("import os; print(os.listdir('/tmp'))").stdout == "[]\n"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("libc.unshare(0x10000000)", "EPERM"),
        ("libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)", "EPERM"),
        ("libc.ptrace(0, 0, 0, 0)", "EPERM"),
        ("libc.syscall(321, 0, 0, 0)", "EPERM"),  # bpf
        ("libc.syscall(56, 0x10000011, 0, 0, 0, 0)", "EPERM"),  # clone with CLONE_NEWUSER
        ("libc.syscall(435, 0, 0)", "ENOSYS"),  # clone3
        ("libc.socket(40, 1, 0)", "EPERM"),  # AF_VSOCK
        ("libc.semget(0, 32000, 0o1600)", "EPERM"),
        ("libc.msgget(0, 0o1600)", "EPERM"),
        ("libc.inotify_init1(0)", "EPERM"),
    ],
)
def test_calls_that_leave_a_sandbox_are_refused(call: str, error: str) -> None:
    source = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"print({call}, errno.errorcode[ctypes.get_errno()])\n"
    )
    assert run_program(source).stdout == f"-1 {error}\n"


def test_memory_of_all_processes_together_is_limited() -> None:
    source = (
        "import os, time\n"
        "for n in range(3):\n"
        "    if os.fork() == 0:\n"
        "        held = bytearray(150 << 20)\n"
        "        time.sleep(20)\n"
        "time.sleep(20); print('all')\n"
    )
    outcome = run_program(source, limits=SMALL)
    assert outcome.exit_code != 0
    assert not outcome.timed_out
    assert "all" not in outcome.stdout


def test_shared_memory_counts_though_nobody_has_it_mapped() -> None:
    source = (
        "import mmap, os, time\n"
        "for n in range(3):\n"
        "    if os.fork() == 0:\n"
        "        held = mmap.mmap(-1, 150 << 20)\n"
        "        for _ in range(150):\n"
        "            held.write(bytes(1 << 20))\n"
        "            held.madvise(mmap.MADV_DONTNEED)\n"
        "        time.sleep(20)\n"
        "time.sleep(20); print('all')\n"
    )
    outcome = run_program(source, limits=SMALL)
    assert (outcome.exit_code != 0, outcome.timed_out, outcome.stdout) == (True, False, "")


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_a_program_that_replaces_its_output_by_a_pipe_or_a_link_holds_nobody_up(
    isolation: Isolation, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    source = (
        "import os, pathlib\n"
        "for name in ('../stdout', '../stderr', 'stdout'):\n"
        "    try:\n"
        "        pathlib.Path(name).unlink(missing_ok=True)\n"
        f"        os.symlink({str(secret)!r}, name)\n"
        "    except OSError as error:\n"
        "        print(error)\n"
    )
    outcome = run_program(source, isolation=isolation)
    assert "of the user" not in outcome.stdout + outcome.stderr


@pytest.mark.parametrize("escape", ["os.setsid()", "pass"])
def test_nothing_that_a_program_started_outlives_it(escape: str) -> None:
    marker = f"areal-sandbox-orphan-{escape[3:9]}"
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        f"    {escape}\n"
        f"    if os.fork() == 0: os.execv('/bin/sleep', ['{marker}', '3600'])\n"
        "    os._exit(0)\n"
        "time.sleep(0.2)\n"
    )
    assert run_program(source).exit_code == 0
    wait_for(lambda: not is_running(marker), 30)


def test_the_first_process_of_a_sandbox_is_out_of_a_program_s_reach() -> None:
    """Who writes to its memory could have it say that all went well, and stay."""
    source = (
        "import os, signal\n"
        "for name in ('mem', 'environ', 'fd/0'):\n"
        "    try:\n"
        "        os.open(f'/proc/1/{name}', os.O_RDWR if name == 'mem' else os.O_RDONLY)\n"
        "    except PermissionError:\n"
        "        print('refused')\n"
        "for sign in (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM):\n"
        "    os.kill(1, sign)\n"
        "print('there', os.getppid())\n"
    )
    outcome = run_program(source)
    assert (outcome.exit_code, outcome.stdout) == (0, "refused\n" * 3 + "there 1\n")


def is_running(marker: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if marker.encode() in path.read_bytes():
                return True
    return False


RUN_AS_ASKED = (
    "import sys; from areal_hpc.sandbox.process import run_program\n"
    "try: print(run_program('import os; print(os.getuid())', isolation=sys.argv[1]))\n"
    "except Exception as error: print(type(error).__name__, error)\n"
)


def run_apart(isolation: str, *command: str) -> str:
    """What a process that a command starts gets of a program that prints its user."""
    words = [*command, sys.executable, "-c", RUN_AS_ASKED, isolation]
    found = subprocess.run(words, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    return found.stdout + found.stderr


def test_an_ordinary_user_may_run_it_and_so_may_root_of_a_container() -> None:
    for mapped in (("--map-user=1234", "--map-group=1234"), ("--map-root-user",)):
        assert "stdout='65534\\n'" in run_apart("bwrap", "unshare", "--user", *mapped)


def test_where_the_kernel_allows_no_namespaces_a_program_is_refused_and_the_way_out_named() -> None:
    """As on many clusters."""
    script = (
        "echo 0 > /proc/sys/user/max_user_namespaces; "
        'exec setpriv --inh-caps=-all --bounding-set=-all "$@"'
    )
    command = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh")
    refused = run_apart("bwrap", *command)
    assert refused.startswith("RecipeError")
    assert "programs that the model wrote cannot be isolated on this machine" in refused
    assert "reward.isolation=none" in refused
    assert "stdout='0\\n'" in run_apart("none", *command)


def test_what_else_fails_is_not_called_a_refusal_of_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "python3")
    monkeypatch.setattr(process, "find_sandbox_python", lambda **_: (missing, None))
    with pytest.raises(ClusterError, match=f"did not start: .*{missing}.*No such file"):
        run_program("")


def test_a_python_in_the_temporary_folder_runs() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as prefix:
        Path(prefix).chmod(0o755)
        program = Path(prefix) / "python3"
        program.write_text('#!/bin/sh\nexec /usr/bin/python3 "$@"\n')
        program.chmod(0o755)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(process, "find_sandbox_python", lambda **_: (str(program), prefix))
            assert run_program("print(7)").stdout == "7\n"


def count_open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


JUDGED = ("def double(x): return 2 * x", "assert double(2) == 4")


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_a_judged_answer_leaves_no_descriptor_open(
    isolation: Isolation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ISOLATION_VARIABLE, isolation)
    assert passes_tests(*JUDGED, SMALL)
    before = count_open_descriptors()
    assert passes_tests(*JUDGED, SMALL)
    assert count_open_descriptors() <= before


@pytest.fixture
def failing_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Have bubblewrap fail for each program of that name, as it does on a full node."""
    found = find_bubblewrap()
    assert found is not None
    real = make_bwrap_public(found)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)

        def fail(program: str, said: str) -> None:
            ending = f"echo bwrap: {said} >&2; exit 1"
            script = f'case "$*" in *{program}*) {ending};; esac\nexec {real} "$@"'
            path = write_program(Path(name, "bwrap"), script)
            monkeypatch.setattr(bubblewrap_command_line, "find_bubblewrap", lambda: path)

        yield fail


@pytest.mark.parametrize(
    ("program", "kind"), [("answer_main.py", ClusterError), ("judge_main.py", RecipeError)]
)
def test_an_answer_whose_sandbox_does_not_start_is_not_judged(
    program: str, kind: type[Exception], failing_for: Callable[..., None]
) -> None:
    failing_for(program, "Creating new namespace failed: Operation not permitted")
    before = count_open_descriptors()
    with pytest.raises(kind):
        passes_tests(*JUDGED, SMALL)
    assert count_open_descriptors() <= before


def test_a_program_that_the_system_cannot_start_is_the_clusters_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = Path("/usr/bin/no-such-bwrap")
    monkeypatch.setattr(bubblewrap_command_line, "find_bubblewrap", lambda: missing)
    monkeypatch.setattr(bubblewrap_command_line, "make_bwrap_public", lambda path: path)
    before = count_open_descriptors()
    with pytest.raises(ClusterError, match="could not be started"):
        run_program("", isolation="bwrap")
    assert count_open_descriptors() <= before


def test_the_watch_of_memory_reads_nothing_of_other_processes() -> None:
    """A node has thousands, and a program is looked at twenty times a second."""
    watched = SandboxedProcess({"program.py": b"input(); input()"}, SMALL, "none")
    opened, is_noted = set[str](), [True]

    def note(event: str, args: tuple[object, ...]) -> None:
        if is_noted and event == "open":
            opened.add(str(args[0]))

    sys.addaudithook(note)
    try:
        assert not watched.is_over_memory()
    finally:
        is_noted.clear()  # a hook cannot be taken away
        watched.kill()
    pids = {path.split("/")[2] for path in opened if path.startswith("/proc/")}
    assert pids
    assert str(os.getppid()) not in pids


def test_many_objects_of_an_answer_are_numbered_in_no_time() -> None:
    """30 000 of them took as many seconds as an answer has, when each was compared with all."""
    nodes = f"class Node: pass\ndef build(): return [Node() for _ in range({MAX_ITERATED_ITEMS})]"
    assert passes_tests(
        nodes,
        f"assert len({{id(one) for one in build()}}) == {MAX_ITERATED_ITEMS}",
        ProgramLimits(),
    )


def test_a_node_without_processes_is_not_taken_for_one_that_cannot_isolate(
    failing_for: Callable[..., None],
) -> None:
    failing_for("launcher.py", "Creating new namespace failed: Resource temporarily unavailable")
    with pytest.raises(SandboxStartError, match="temporarily"):
        run_program("", isolation="bwrap")
    failing_for("launcher.py", "Creating new namespace failed: Operation not permitted")
    with pytest.raises(RecipeError, match="cannot be isolated"):
        run_program("", isolation="bwrap")

"""Limits of a model's program in the sandbox: each one is run into."""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from areal_hpc.errors import ClusterError, RecipeError, SandboxStartError
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.reward.code import passes_tests
from areal_hpc.reward.judging.answer_main import MAX_ITERATED_ITEMS
from areal_hpc.sandbox import bwrap, program
from areal_hpc.sandbox.program import Isolation, ProgramLimits, check_programs_run, run_program
from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

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
            "['HOME', 'LC_ALL', 'PATH', 'TMPDIR', 'USER']\n[]\n",
        ),
    ],
)
def test_a_program_may_read_print_write_and_start_threads(source: str, printed: str) -> None:
    outcome = run_program(source, "abc\n")
    assert (outcome.exit_code, outcome.stdout, outcome.timed_out) == (0, printed, False)


def test_endless_work_is_stopped() -> None:
    outcome = run_program("while True: pass", limits=SMALL)
    assert outcome.timed_out
    assert outcome.exit_code != 0


def test_there_is_no_network_no_other_process_and_nothing_of_the_user(tmp_path: Path) -> None:
    secret = tmp_path / "admin.key"
    secret.write_text("key of the run")
    secret.chmod(0o644)
    source = (
        "import os, socket\n"
        "names = [name for _, name in socket.if_nameindex()]\n"
        "print([name for name in os.listdir('/proc') if name.isdigit()], names, os.getuid())\n"
        f"for path in ({str(secret)!r}, '/etc/shadow', {__file__!r}):\n"
        "    print(os.path.exists(path))\n"
        "socket.create_connection(('127.0.0.1', 9), 1)\n"
    )
    outcome = run_program(source)
    assert outcome.stdout == "['1', '2'] ['lo'] 65534\n" + 3 * "False\n"
    assert "ConnectionRefusedError" in outcome.stderr


def test_what_it_writes_is_of_limited_size_and_gone_afterwards() -> None:
    limits = ProgramLimits(disk_bytes=1 << 20)
    for folder in ("/tmp", "/dev/shm"):
        source = f"for name in 'ab': open('{folder}/' + name, 'wb').write(bytes(700 << 10))"
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
        ("libc.inotify_init1(0)", "EMFILE"),
    ],
)
def test_calls_that_leave_a_sandbox_are_refused(call: str, error: str) -> None:
    source = (
        "import ctypes, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"print({call}, errno.errorcode[ctypes.get_errno()])\n"
    )
    assert run_program(source).stdout == f"-1 {error}\n"


RUN_AS_ASKED = (
    "import sys; from areal_hpc.sandbox.program import run_program\n"
    "try: print(run_program('import os; print(os.getuid())', isolation=sys.argv[1]))\n"
    "except Exception as error: print(type(error).__name__, error)\n"
)


def run_apart(isolation: str, *command: str) -> str:
    """Run a program that prints its user in a sandbox below a command; return all output."""
    words = [*command, sys.executable, "-c", RUN_AS_ASKED, isolation]
    process = subprocess.run(words, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    return process.stdout + process.stderr


def test_where_the_kernel_allows_no_namespaces_a_program_is_refused_and_the_way_out_named() -> None:
    """Many clusters allow none."""
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


def test_other_failures_are_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "python3")
    monkeypatch.setattr(program, "require_python", lambda: (missing, None))
    with pytest.raises(ClusterError, match=f"did not run: .*{missing}"):
        check_programs_run()


def test_a_python_in_the_temporary_folder_runs() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as prefix:
        Path(prefix).chmod(0o755)
        python = write_program(Path(prefix) / "python3", 'exec /usr/bin/python3 "$@"')
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(program, "require_python", lambda: (str(python), prefix))
            assert run_program("print(7)").stdout == "7\n"


def count_open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


JUDGED = ("def double(x): return 2 * x", "assert double(2) == 4")


@pytest.mark.parametrize("isolation", ["bwrap", "none"])
def test_a_judge_leaves_nothing_open(isolation: Isolation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISOLATION_VARIABLE, isolation)
    assert passes_tests(*JUDGED, SMALL)
    before = count_open_descriptors()
    assert passes_tests(*JUDGED, SMALL)
    assert count_open_descriptors() <= before


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Creating new namespace failed: Operation not permitted", RecipeError),
        ("Creating new namespace failed: Resource temporarily unavailable", SandboxStartError),
        ("Can't bind mount", ClusterError),
    ],
)
def test_an_answer_whose_sandbox_does_not_start_is_not_judged(
    message: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        path = write_program(Path(name, "bwrap"), f"echo bwrap: {shlex.quote(message)} >&2; exit 1")
        monkeypatch.setattr(bwrap, "find_bubblewrap", lambda: path)
        before = count_open_descriptors()
        with pytest.raises(kind, match=message):
            passes_tests(*JUDGED, SMALL)
        assert count_open_descriptors() <= before


def test_many_objects_of_an_answer_are_numbered_in_no_time() -> None:
    """Comparing each of 30 000 with all others took as many seconds as an answer has."""
    nodes = f"class Node: pass\ndef build(): return [Node() for _ in range({MAX_ITERATED_ITEMS})]"
    assert passes_tests(
        nodes,
        f"assert len({{id(one) for one in build()}}) == {MAX_ITERATED_ITEMS}",
        ProgramLimits(),
    )

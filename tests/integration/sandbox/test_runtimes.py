"""Every runtime on this machine keeps the promises of sandboxes."""

import asyncio
import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from areal_hpc.errors import SandboxLostError
from areal_hpc.jobs.processes.process_ties import list_descendants
from areal_hpc.reward.harbor import build_archive
from areal_hpc.sandbox.runtimes import Runtime, find_installed_runtimes, make_runtime
from areal_hpc.sandbox.sandbox import Network, Sandbox, SandboxLimits, SandboxSpec
from tests.support.apptainer_stand_in import write_apptainer_stand_in
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT
from tests.support.process_commands import is_running
from tests.support.root_file_system import make_root_file_system
from tests.support.sandboxes import started
from tests.support.waiting import wait_for

pytestmark = pytest.mark.asyncio
INSTALLED = find_installed_runtimes()
NAMES = INSTALLED if "apptainer" in INSTALLED else [*INSTALLED, "apptainer"]
"""Apptainer, where it is missing, is a stand-in of its command line."""
ISOLATING = [name for name in NAMES if name != "none"]
SMALL = SandboxLimits(
    memory_bytes=256 << 20, processes=40, disk_bytes=8 << 20, files=300, output_bytes=1 << 16
)


@pytest.fixture(scope="module", autouse=True)
def apptainer() -> Iterator[None]:
    """Put the stand-in on the path if it is needed."""
    if "apptainer" in INSTALLED:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        Path(folder).chmod(0o755)
        write_apptainer_stand_in(Path(folder))
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield


@pytest.fixture(params=NAMES)
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return make_runtime(request.param)


@pytest.fixture(params=ISOLATING)
def isolating(request: pytest.FixtureRequest) -> Runtime:
    return make_runtime(request.param)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root_file_system(tmp_path_factory.mktemp("root"))


@contextlib.asynccontextmanager
async def start(
    runtime: Runtime, root: Path | None = None, network: Network = "none"
) -> AsyncIterator[Sandbox]:
    network = "open" if runtime.name == "none" else network
    async with started(runtime, SandboxSpec(root, network, SMALL)) as sandbox:
        yield sandbox


@pytest_asyncio.fixture
async def sandbox(runtime: Runtime) -> AsyncIterator[Sandbox]:
    async with start(runtime) as started:
        yield started


@pytest_asyncio.fixture
async def isolated(isolating: Runtime) -> AsyncIterator[Sandbox]:
    async with start(isolating) as started:
        yield started


async def test_a_command_has_pipes_an_exit_code_a_folder_and_variables(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        "cat; echo $COLOR; pwd; echo bad >&2; exit 7", stdin="in\n", variables={"COLOR": "blue"}
    )
    assert result.stdout.decode() == f"in\nblue\n{sandbox.folder}\n"
    assert (result.stderr, result.exit_code, result.timed_out) == (b"bad\n", 7, False)
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    assert (await sandbox.exec("kill -TERM $$")).exit_code == 128 + signal.SIGTERM
    many = await asyncio.gather(*(sandbox.exec(["cat"], stdin=str(n)) for n in range(8)))
    assert [result.stdout for result in many] == [str(n).encode() for n in range(8)]


async def test_a_long_input_goes_through_whether_it_is_read_or_not(sandbox: Sandbox) -> None:
    content = bytes(range(256)) * 20_000
    counted = await sandbox.exec(["wc", "-c"], stdin=content)
    assert counted.stdout.split() == [str(len(content)).encode()]
    assert (await sandbox.exec(["true"], stdin=content)).exit_code == 0
    assert (await sandbox.exec("echo on")).stdout == b"on\n"


async def test_a_command_that_is_too_slow_or_too_loud_is_killed_alone(sandbox: Sandbox) -> None:
    slow = await sandbox.exec("sleep 60 & sleep 60", timeout_s=0.5)
    assert slow.timed_out
    assert slow.exit_code == 128 + signal.SIGKILL
    loud = await sandbox.exec(["yes"])
    assert loud.is_cut_off
    assert len(loud.stdout) == SMALL.output_bytes
    assert (await sandbox.exec("echo on")).stdout == b"on\n"


async def test_what_a_command_leaves_in_the_background_holds_nobody_up(sandbox: Sandbox) -> None:
    began = await sandbox.exec("sleep 300 > /dev/null & echo $!", timeout_s=scaled(30))
    assert not began.timed_out
    alive = await sandbox.exec(f"kill -0 {began.text.strip()}")
    assert alive.exit_code == 0


async def test_files_go_in_and_out_and_pipes_hold_nobody_up(sandbox: Sandbox) -> None:
    content = os.urandom(200_000)
    await sandbox.put("deep/down/file", content, mode=0o755)
    assert await sandbox.get("deep/down/file") == content
    assert (await sandbox.exec("test -x deep/down/file")).exit_code == 0
    await sandbox.exec("mkfifo pipe; ln -s /dev/zero endless")
    for name in ("pipe", "endless", "missing", "deep"):
        with pytest.raises(OSError, match=name):
            await sandbox.get(name)
    with pytest.raises(OSError, match="longer"):
        await sandbox.get("deep/down/file", max_bytes=1000)


async def test_a_file_that_is_only_long_is_not_read() -> None:
    sandbox = await make_runtime("bwrap").start(SandboxSpec())
    await sandbox.exec("truncate -s 1000M sparse; echo held >> sparse")
    with pytest.raises(OSError, match="longer than 67108864 bytes"):
        await sandbox.get("sparse")
    await sandbox.stop()


async def test_files_of_a_task_take_the_place_of_others_and_go_where_a_link_of_a_folder_leads(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("text\n")

    async with start(make_runtime("bwrap")) as sandbox:
        link, wall = f"{sandbox.folder}/place", f"{sandbox.folder}/wall"
        await sandbox.exec(
            "mkdir -p aside/full/deep; ln -s aside place; chmod 500 aside/full; echo old > "
            "aside/closed; chmod 400 aside/closed; ln -s kept aside/link; echo kept > aside/kept; "
            "echo file > wall"
        )
        names = ("new", "full", "closed", "link")
        pairs = [(tmp_path / "file", f"{link}/{name}") for name in names]
        await sandbox.unpack(build_archive(pairs, folders=[link, wall]))
        shown = await sandbox.exec("cd aside && cat new full closed link kept; readlink ../place")
        assert shown.text == "text\n" * 4 + "kept\naside\n"
        packed = await sandbox.pack("aside", 1 << 20)
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            assert {*archive.getnames()} == {".", "./kept", *(f"./{name}" for name in names)}


async def test_a_root_file_system_is_written_over_and_stays(isolating: Runtime, root: Path) -> None:
    async with start(isolating, root) as sandbox:
        result = await sandbox.exec("cat /etc/os-release; ls -d /usr/bin /home /root")
        assert result.stdout == b"NAME=small\n"
        await sandbox.exec("rm /data/old/gone; echo new > /data/new; echo x >> /data/old/kept")
        assert (await sandbox.exec("cat /data/*/* /data/new")).stdout == b"kept\nx\nnew\n"
        async with start(isolating, root) as other:
            assert (await other.exec("ls /data /data/old")).text.split().count("gone") == 1
    assert (root / "data/old/gone").exists()
    assert not (root / "data/new").exists()


async def test_nothing_of_the_machine_is_seen(isolating: Runtime, tmp_path: Path) -> None:
    secret = tmp_path / "admin.key"
    secret.write_text("key of the run")
    secret.chmod(0o644)
    os.environ["HUB_TOKEN"] = "of the user"

    async with start(isolating) as sandbox:
        result = await sandbox.exec(f"cat {secret} {__file__} /etc/shadow; ls -A /home /root")
        assert result.stdout == b""
        assert "HUB_TOKEN" not in (await sandbox.exec(["env"])).text
        shown = await sandbox.exec("cat /proc/[0-9]*/cmdline /proc/self/mountinfo")
        text = shown.text.replace(f"{CHECKOUT}/.roots/", "")  # Apptainer itself may be there
        for word in (str(CHECKOUT), str(tmp_path), "pytest"):
            assert word not in text
        assert (await sandbox.exec("ls -d /proc/[0-9]*")).text.count("/proc/") < 10


async def test_a_runs_umask_hides_nothing_from_its_sandboxes(isolating: Runtime) -> None:
    before = os.umask(0o077)
    try:
        async with start(isolating) as sandbox:
            result = await sandbox.exec("umask; touch file; cat /etc/passwd | wc -l")
    finally:
        os.umask(before)
    assert result.text.split() == ["0022", "1"]


@pytest.mark.parametrize("path", ["/usr/planted", "/planted", "/sandbox/planted", "/etc/planted"])
async def test_the_system_is_read_only(isolated: Sandbox, path: str) -> None:
    assert (await isolated.exec(f"touch {path}")).exit_code != 0


@contextlib.contextmanager
def serve_words() -> Iterator[int]:
    """Serve a port of this machine's loopback that answers every line in capitals."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(peer.recv(1000).upper())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


CALL = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 3) as peer:
        peer.sendall(b'hello'); peer.shutdown(socket.SHUT_WR); print(peer.recv(100).decode())
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("network", ["none", "session-only"])
async def test_a_network_reaches_its_session_and_nothing_else(
    network: Network, isolating: Runtime
) -> None:
    async def call(sandbox: Sandbox, host: str, at: int) -> str:
        result = await sandbox.exec(["python3", "-c", CALL, host, str(at)])
        return result.text.strip()

    with serve_words() as port:
        async with start(isolating, network=network) as sandbox:
            if network == "session-only":
                url = await sandbox.open_model_endpoint(f"http://127.0.0.1:{port}")
                at = int(url.rpartition(":")[2])
                assert await call(sandbox, "127.0.0.1", at) == "HELLO"
                many = (call(sandbox, "127.0.0.1", at) for _ in range(5))
                assert await asyncio.gather(*many) == ["HELLO"] * 5
            for host in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.0.2.1"):
                assert (await call(sandbox, host, port)).endswith("Error")


async def test_memory_of_all_processes_together_ends_the_sandbox(isolated: Sandbox) -> None:
    eater = "import time; kept = bytearray(90 << 20); time.sleep(30)"
    with pytest.raises(SandboxLostError, match="256 MiB of memory"):
        await isolated.exec(f"for n in 1 2 3 4; do python3 -c '{eater}' & done; wait")
    with pytest.raises(SandboxLostError):
        await isolated.exec(["true"])


async def test_memory_of_one_process_is_refused_to_it(isolated: Sandbox) -> None:
    refused = await isolated.exec(["python3", "-c", "bytearray(1 << 30)"])
    assert "MemoryError" in refused.text
    assert (await isolated.exec("echo on")).stdout == b"on\n"


async def test_disk_and_number_of_files_are_limited_in_total(isolated: Sandbox) -> None:
    full = await isolated.exec("head -c 6M /dev/zero > /tmp/a; head -c 6M /dev/zero > b")
    assert "No space left on device" in full.text
    await isolated.exec("rm -f /tmp/a b")
    crowded = await isolated.exec("cd /tmp; for n in $(seq 400); do : > f$n || exit 9; done")
    assert crowded.exit_code != 0
    assert "No space left on device" in crowded.text


async def test_processes_are_limited_and_those_of_others_go_on(
    isolated: Sandbox, isolating: Runtime
) -> None:
    bomb = "for n in $(seq 200); do sleep 20 & done; wait; echo all"
    with contextlib.suppress(SandboxLostError):
        assert "all" not in (await isolated.exec(bomb, timeout_s=20)).stdout.decode()
    async with start(isolating) as other:
        assert (await other.exec("echo on")).stdout == b"on\n"


@pytest.mark.parametrize("sign", ["KILL", "STOP", "HUP", "INT", "TERM", "USR1"])
async def test_a_command_does_not_end_or_stop_the_server_by_a_signal(
    sign: str, isolated: Sandbox
) -> None:
    await isolated.exec(f"kill -{sign} 1; sleep 0.1")
    assert (await isolated.exec("echo on")).stdout == b"on\n"
    interrupted = await isolated.exec("kill -INT $$; echo not interrupted")
    assert interrupted.exit_code == 128 + signal.SIGINT


WRITES = """
import os
for pid in filter(str.isdecimal, os.listdir("/proc")):
    if int(pid) != os.getpid():
        places = [f"/proc/{pid}/mem"]
        try:
            places += [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            pass
        for place in places:
            try:
                os.open(place, os.O_WRONLY)
                print("opened", place)
            except OSError:
                pass
"""


async def test_no_process_with_the_channel_can_be_written_to(isolated: Sandbox) -> None:
    result = await isolated.exec(["python3", "-c", WRITES])
    assert (result.exit_code, result.stdout) == (0, b""), result.text


async def test_memory_that_no_limit_counts_is_refused(isolated: Sandbox) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 1 << 20, 0o1600), libc.semget(0, 32000, 0o1600), libc.msgget(0, 0o1600))
print(libc.mq_open(b"/x", 0o102, 0o600, None))
try:
    os.memfd_create("x")
except OSError as error:
    print(error.errno)
"""

    result = await isolated.exec(["python3", "-c", program])
    assert result.stdout == b"-1 -1 -1\n-1\n1\n", result.text


HIDDEN_MEMORY = {
    "shared pages that nobody has mapped": (
        "import mmap, time\n"
        "held = [mmap.mmap(-1, 64 << 20) for _ in range(5)]\n"
        "for one in held:\n"
        "    one.write(bytes(len(one))); one.madvise(mmap.MADV_DONTNEED)\n"
        "time.sleep(20); print('held')"
    ),
    "unread in sockets": (
        "import socket, time\n"
        "held = [socket.socketpair() for _ in range(900)]\n"
        "for one, _ in held:\n"
        "    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)\n"
        "    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 1 << 20\n"
        "time.sleep(20); print('held')"
    ),
}


@pytest.mark.parametrize("how", HIDDEN_MEMORY)
async def test_memory_that_is_no_process_s_counts(how: str, isolated: Sandbox) -> None:
    with pytest.raises(SandboxLostError, match="MiB of memory"):
        await isolated.exec(["python3", "-c", HIDDEN_MEMORY[how]])


TAKES_OF_THE_USER = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
print(sum(libc.inotify_init() >= 0 for _ in range(200)))
print(resource.getrlimit(resource.RLIMIT_SIGPENDING)[1])
held = 0
try:
    while held < 200:
        os.openpty()
        held += 1
except OSError:
    pass
print(held)
"""


async def test_what_a_user_has_few_of_is_not_used_up(isolated: Sandbox, isolating: Runtime) -> None:
    """Watches of files, pending signals and terminals suffice for the user's other programs."""

    result = await isolated.exec(["python3", "-c", TAKES_OF_THE_USER])
    watches, signals, terminals = map(int, result.stdout.split())
    assert 0 < watches <= 64, result.text
    assert signals == 4096
    if isolating.name == "bwrap":
        assert 0 < terminals <= 64


@pytest.mark.parametrize("escape", ["setsid sleep 300 &", "setsid sh -c 'sleep 300 &' &"])
async def test_a_stopped_sandbox_leaves_no_process(runtime: Runtime, escape: str) -> None:
    async with start(runtime) as sandbox:
        await sandbox.exec(f"{escape} sleep 0.2")
        pids = [sandbox.pid, *list_descendants(sandbox.pid)]
    assert len(pids) >= 2
    wait_for(lambda: not [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()])


OWNER = """
import asyncio, sys, time
from areal_hpc.jobs.processes.process_ties import list_descendants
from areal_hpc.sandbox.sandbox import SandboxSpec
from areal_hpc.sandbox.runtimes import make_runtime
async def main():
    runtime = make_runtime(sys.argv[1])
    sandboxes = [await runtime.start(SandboxSpec()) for _ in range(2)]
    for one in sandboxes:
        await one.exec("setsid sleep 300 & sleep 0.2")
    print(*(pid for one in sandboxes for pid in (one.pid, *list_descendants(one.pid))), flush=True)
    await asyncio.sleep(300)
asyncio.run(main())
"""


async def test_an_owner_that_is_killed_leaves_no_process(runtime: Runtime) -> None:
    """No mount or namespace survives either, as these belong to these processes alone."""
    command = [sys.executable, "-c", OWNER, runtime.name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=CHECKOUT) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) >= 4
    wait_for(lambda: not any(map(is_running, pids)), 30)


async def test_no_rights_can_be_gained(isolated: Sandbox) -> None:
    for attempt in (
        "mount -t tmpfs none /tmp",
        "su -c true",
        "chroot / true",
        "unshare -Ur true",
    ):
        assert (await isolated.exec(attempt, timeout_s=10)).exit_code != 0, attempt
    status = (await isolated.exec("grep -E 'CapEff|CapPrm' /proc/self/status")).text
    assert set(status.split()[1::2]) == {"0" * 16}


AS_USER = """
import asyncio, sys
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.sandbox import SandboxSpec
async def main():
    sandbox = await make_runtime(sys.argv[1]).start(SandboxSpec(network="session-only"))
    print((await sandbox.exec("id -u; echo text > a; cat a")).stdout)
    await sandbox.stop()
asyncio.run(main())
"""


@pytest.mark.parametrize("mapped", [("--map-user=1234", "--map-group=1234"), ("--map-root-user",)])
async def test_an_ordinary_user_may_have_one_and_so_may_root_of_a_container(
    mapped: tuple[str, ...], isolating: Runtime
) -> None:
    command = ["unshare", "--user", *mapped, sys.executable, "-c", AS_USER, isolating.name]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert result.stdout == repr(b"65534\ntext\n") + "\n", result.stderr

"""SGLang server with its processes: ports, start, readiness, health, end, and log."""

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import Full, Queue

import psutil

from areal_hpc.inference.server.command import ServerCommand, ServerPorts
from areal_hpc.inference.server.node_files import (
    build_cache_variables,
    make_cache_dir,
    remove_stale_files,
)
from areal_hpc.inference.server.sglang_main import KEYS_FILE_VARIABLE, write_keys_file
from areal_hpc.jobs.node import LOOPBACK_ADDRESS
from areal_hpc.rundir.files import make_folder, write_all
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.wire.awake_clock import AwakeClock
from areal_hpc.wire.http import responds_with_200

log = logging.getLogger(__name__)

STOP_GRACE_S = 1.0
"""Time for a server to end after a stop request."""
_KILL_TIMEOUT_S = 30.0
"""Maximum time for the kernel to end a process and to free its memory."""
_MAX_TEMP_DIR_CHARS = 79
"""Maximum length of a scratch folder's parent; a socket's path may have 107 characters."""
_LOG_WRITE_TIMEOUT_S = 1.0
"""Time to write the last output of a server that has ended."""
_READY_REQUEST_TIMEOUT_S = 0.5
_CONTINUE_TIMEOUT_S = 2.0
_PROCESS_TITLE_PREFIX = "sglang::"
"""Prefix of the titles of schedulers and detokenizers (sglang 0.5.23, `srt/managers`)."""
_PORT_TAKEN_MESSAGES = ("address already in use", "Port is already in use")
_LOG_TAIL_BYTES = 16384
_ERROR_LINE_PATTERN = re.compile(r"(\[[^]]*\] *)?([\w.]+(Error|Exception)\b|.*\berror:)")
"""Last line of a traceback, or error message of a program, perhaps behind a time."""
_MAX_ERROR_LINE_CHARS = 300
_LOCAL_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MIN_PORT = 10000
_MIN_PORT_COUNT = 1000
"""Minimum number of candidates; with fewer, cells that start together would choose equal ports."""
_LOG_READ_INTERVAL_S = 2.0
_MAX_HELD_PIECES, _MAX_PIECE_BYTES = 1024, 1 << 16
"""Limits of output that waits for the log's storage; more output is dropped."""
_PROBES_PER_TIMEOUT = 6
"""Probes that a server can answer before it counts as silent."""


def choose_server_ports() -> ServerPorts:
    """Choose free ports. Another process may still take one before SGLang does."""
    http_port = _find_free_port()
    while (rendezvous_port := _find_free_port()) == http_port:
        pass
    return ServerPorts(http_port, rendezvous_port)


def _find_free_port() -> int:
    """Find a free port, if possible outside the kernel's range for outgoing connections.

    SGLang binds the port ten seconds or more later. In that time a connection of any process on the
    node could get a port of that range.
    """
    first_outgoing = int(_LOCAL_PORT_RANGE_FILE.read_text().split()[0])
    candidates = range(_MIN_PORT, first_outgoing)
    while True:
        port = secrets.choice(candidates) if len(candidates) >= _MIN_PORT_COUNT else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])


def make_scratch_dir() -> str:
    """Create a folder for SGLang's files and sockets: in TMPDIR, or in /tmp if that is too long.

    A batch job's TMPDIR may be long, and SGLang ends at its start if a socket's path is too long.
    """
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="sglang-", dir=parent if len(parent) <= _MAX_TEMP_DIR_CHARS else "/tmp"
    )


class SGLangServer:
    """Running SGLang server with all its processes.

    Create it in a thread that lives as long as the server may: the kernel ties the death signal to
    the thread, not to the process, that started the child.
    """

    def __init__(
        self, command: ServerCommand, ports: ServerPorts, log_path: Path, *, started_at: float
    ) -> None:
        self.url = f"http://{LOOPBACK_ADDRESS}:{ports.http}"
        self.keys = command.keys
        self.log_path = log_path
        self.started_at = started_at
        """Time of the start by the caller's clock."""
        self._http_port = ports.http
        if stale := remove_stale_files():
            log.info("removed %d files of shared memory that dead servers left", len(stale))
        self._members: list[psutil.Process] | None = None  # set once it is ready
        self._log_due_at = self.started_at + _LOG_READ_INTERVAL_S
        # SGLang does not remove its sockets, which have random names: they are deleted with this
        # folder. Compiled kernels stay in the cache for the next server.
        self._scratch_dir = make_scratch_dir()
        caches = build_cache_variables(os.environ, make_cache_dir(Path(self._scratch_dir)))
        environment = os.environ | {"TMPDIR": self._scratch_dir} | caches | command.environment
        if self.keys.admin:
            keys_file = write_keys_file(Path(self._scratch_dir), self.keys.api, self.keys.admin)
            environment |= {KEYS_FILE_VARIABLE: str(keys_file)}
        wrapper = "areal_hpc.jobs.processes.process_ties"
        self._log = ServerLogPipe(log_path)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", wrapper, str(os.getpid()), *command.argv],
                stdin=subprocess.DEVNULL,
                stdout=self._log.write_end,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        finally:
            self._log.start_copying()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self) -> bool:
        """Return whether SGLang accepts requests; do not call it while SGLang is paused."""
        if not responds_with_200("GET", f"{self.url}/ready", _READY_REQUEST_TIMEOUT_S):
            return False
        if self._members is None:
            if not _is_listening(self.pid, self._http_port):
                return False  # another process answered on this port
            self._members = _find_engine_processes(self.pid)
        return True

    def continue_generation(self) -> bool:
        url = f"{self.url}/continue_generation"
        return responds_with_200("POST", url, _CONTINUE_TIMEOUT_S, key=self.keys.admin)

    def find_death_reason(self) -> str:
        """Find the reason why the server is dead; empty while it lives.

        A server may live for up to a minute after its scheduler was killed. So each scheduler and
        detokenizer that existed when the server became ready must still run.
        """
        code = self._process.poll()
        if code is not None:
            return f"exited with code {code}"
        for member in self._members or ():
            with suppress(psutil.NoSuchProcess):
                if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                    continue
            return f"lost its process {member.pid}"
        return ""

    def check_binding_failed(self, now: float) -> bool:
        """Return whether SGLang logged that it could not bind its port; 0.5.23 then hangs.

        The log may be on storage that all cells share, so it is read every two seconds at most.
        """
        if now < self._log_due_at:
            return False
        self._log_due_at = now + _LOG_READ_INTERVAL_S
        return self.lost_port_race()

    @property
    def has_usage_error(self) -> bool:
        return self._process.poll() == 2  # argparse's exit code

    def lost_port_race(self) -> bool:
        return any(text in self.read_log_tail() for text in _PORT_TAKEN_MESSAGES)

    def read_log_tail(self, lines: int = 25) -> str:
        text = read_tail_lines(self.log_path, _LOG_TAIL_BYTES).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def request_stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self, grace_s: float = 0.0) -> None:
        """Kill all processes of the server after `grace_s`.

        A process that cannot end because a driver or storage hangs is abandoned with a line in the
        log, so that the other replicas are still watched.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            log.error(
                "SGLang (process %d) was killed and has not ended within %.0f s: the GPU driver or "
                "the storage of this node hangs",
                self.pid,
                _KILL_TIMEOUT_S,
            )
        self._log.await_written(_LOG_WRITE_TIMEOUT_S)
        shutil.rmtree(self._scratch_dir, ignore_errors=True)


class ServerLogPipe:
    """Pipe for a server's output, which threads copy to its log file.

    A server that wrote to shared storage itself would hang with that storage: it would answer no
    request, and count as dead after `inference.health_timeout_s`.
    """

    def __init__(self, path: Path) -> None:
        """Open the log file for appending."""
        make_folder(path.parent)
        self._path = path
        self._file: FileIO | None = path.open("ab", buffering=0)
        self._pieces: Queue[bytes] = Queue(_MAX_HELD_PIECES)
        self._read_end, self.write_end = os.pipe()
        """`write_end` is the server's; `start_copying` closes it in this process."""
        self._writer = threading.Thread(target=self._write_pieces, name="server-log", daemon=True)

    def start_copying(self) -> None:
        """Start the threads that copy; the server must have inherited its end of the pipe."""
        os.close(self.write_end)
        threading.Thread(target=self._read_pipe, name="server-output", daemon=True).start()
        self._writer.start()

    def await_written(self, timeout_s: float) -> None:
        self._writer.join(timeout_s)

    def _read_pipe(self) -> None:
        dropped_bytes = 0
        while piece := os.read(self._read_end, _MAX_PIECE_BYTES):
            try:
                self._pieces.put_nowait(_format_gap(dropped_bytes) + piece)
                dropped_bytes = 0
            except Full:
                dropped_bytes += len(piece)
        os.close(self._read_end)
        if dropped_bytes:
            self._pieces.put(_format_gap(dropped_bytes))
        self._pieces.put(b"")

    def _write_pieces(self) -> None:
        while piece := self._pieces.get():
            try:
                self._file = self._file or self._path.open("ab", buffering=0)
                write_all(self._file.fileno(), [piece])
            except OSError as error:
                log.error("%d bytes of %s were not written: %s", len(piece), self._path, error)
                self._close_file()  # reopen it: the handle may be stale
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None


def _format_gap(dropped_bytes: int) -> bytes:
    note = f"\n({dropped_bytes} bytes left out: the storage took none)\n"
    return note.encode() if dropped_bytes else b""


def find_error_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR_LINE_PATTERN.match(line)]
    return (errors or lines or [""])[-1][:_MAX_ERROR_LINE_CHARS]


def _is_listening(pid: int, port: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(pid)
        for process in (leader, *leader.children(recursive=True)):
            # CAMEL's environment has an older psutil, without `net_connections`.
            list_sockets = getattr(process, "net_connections", None) or process.connections
            for socket_ in list_sockets("tcp"):
                if socket_.status == psutil.CONN_LISTEN and socket_.laddr.port == port:
                    return True
    return False


def _find_engine_processes(pid: int) -> list[psutil.Process]:
    engine = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):
                if "".join(child.cmdline()[:1]).startswith(_PROCESS_TITLE_PREFIX):
                    engine.append(child)
    return engine


class HealthProbe:
    """Probe of one server's health.

    SGLang's `/health_generate` succeeds after a second if any token left the scheduler since the
    request, and fails after 20 s if none did (sglang 0.5.23, `srt/entrypoints/http_server.py`). A
    paused server fails, so it must not be probed.
    """

    def __init__(self, url: str, timeout_s: float, clock: AwakeClock) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._probe: threading.Thread | None = None
        self._clock = clock
        self._probed_at = self._alive_at = clock.now()

    def check_silence(self, *, may_ask: bool) -> bool:
        """Probe the server if a probe is due; return whether it has been silent for `timeout_s`.

        During an update, without `may_ask`, it is not probed. Silence counts from the end of the
        update, or of a pause of this process.
        """
        now = self._clock.now()
        self._alive_at = max(self._alive_at, self._clock.woke_at_s)
        if not may_ask:
            self._alive_at = now
            return False
        is_probing = self._probe is not None and self._probe.is_alive()
        if not is_probing and now >= self._probed_at + self._timeout_s / _PROBES_PER_TIMEOUT:
            self._probed_at = now
            self._probe = threading.Thread(target=self._probe_health, name="health", daemon=True)
            self._probe.start()
        return now - self._alive_at > self._timeout_s

    def _probe_health(self) -> None:
        if responds_with_200("GET", f"{self._url}/health_generate", self._timeout_s / 2):
            self._alive_at = self._clock.now()

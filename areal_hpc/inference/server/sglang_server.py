"""One SGLang server process: ports, readiness, liveness, death, log tail."""

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
"""For a server that was asked to end."""
_KILL_TIMEOUT_S = 30.0
"""Longest that the kernel may take to end a process and to free its memory."""
_MAX_TEMP_DIR_CHARS = 79
"""Of the folder above a scratch folder: paths of sockets within that end at 107 characters."""
_LOG_WRITE_TIMEOUT_S = 1.0
"""For the last words of a server that has ended."""
_READY_REQUEST_TIMEOUT_S = 0.5
_CONTINUE_TIMEOUT_S = 2.0
_PROCESS_TITLE_PREFIX = "sglang::"
"""SGLang's schedulers and detokenizers call themselves so (sglang 0.5.23, `srt/managers`)."""
_PORT_TAKEN_MESSAGES = ("address already in use", "Port is already in use")
_LOG_TAIL_BYTES = 16384
_ERROR_LINE_PATTERN = re.compile(r"(\[[^]]*\] *)?([\w.]+(Error|Exception)\b|.*\berror:)")
"""An exception as the end of a traceback, or a program's complaint, with a time before it."""
_MAX_ERROR_LINE_CHARS = 300
_LOCAL_PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_MIN_PORT = 10000
_MIN_PORT_COUNT = 1000
"""Fewer, and cells that start together would choose alike."""
_LOG_READ_INTERVAL_S = 2.0
_MAX_HELD_PIECES, _MAX_PIECE_BYTES = 1024, 1 << 16
"""Output that waits for the storage of a log; the rest is left out."""
_PROBES_PER_TIMEOUT = 6
"""A server has several chances to answer before it counts as silent."""


def choose_server_ports() -> ServerPorts:
    """Ports nobody listens on now. Another process may still take one before SGLang does."""
    http_port = _find_free_port()
    while (rendezvous_port := _find_free_port()) == http_port:
        pass
    return ServerPorts(http_port, rendezvous_port)


def _find_free_port() -> int:
    """One that the kernel gives to no outgoing connection, where it leaves enough of them.

    SGLang binds it ten seconds or more after it was chosen. In that time any connection, of any
    process on the node, might be given a port of the other kind.
    """
    first_outgoing = int(_LOCAL_PORT_RANGE_FILE.read_text().split()[0])
    candidates = range(_MIN_PORT, first_outgoing)
    while True:
        port = secrets.choice(candidates) if len(candidates) >= _MIN_PORT_COUNT else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return int(probe.getsockname()[1])


def make_scratch_dir() -> str:
    """A new folder for SGLang's files and sockets: in TMPDIR, or in /tmp if that is too long.

    A batch job's TMPDIR may be long, and a socket with a long path ends SGLang as it starts.
    """
    place = tempfile.gettempdir()
    return tempfile.mkdtemp(
        prefix="sglang-", dir=place if len(place) <= _MAX_TEMP_DIR_CHARS else "/tmp"
    )


class SGLangServer:
    """A running SGLang server with all its processes.

    Start it from a thread that lives as long as the server may: the kernel's death signal is
    tied to the thread, not to the process, that started the child.
    """

    def __init__(
        self, command: ServerCommand, ports: ServerPorts, log_path: Path, *, started_at: float
    ) -> None:
        self.url = f"http://{LOOPBACK_ADDRESS}:{ports.http}"
        self.keys = command.keys
        self.log_path = log_path
        self.started_at = started_at
        """By the caller's clock."""
        self._http_port = ports.http
        if stale := remove_stale_files():
            log.info("removed %d files of shared memory that dead servers left", len(stale))
        self._members: list[psutil.Process] | None = None  # once it has been ready
        self._log_due_at = self.started_at + _LOG_READ_INTERVAL_S
        # SGLang leaves its sockets behind, and names them after nothing: they go with this folder.
        # What was compiled stays where the next server finds it.
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
        """True when SGLang takes requests. Not to be asked while it is paused: it then says no."""
        if not responds_with_200("GET", f"{self.url}/ready", _READY_REQUEST_TIMEOUT_S):
            return False
        if self._members is None:
            if not _is_listening(self.pid, self._http_port):
                return False  # it was another process that said yes
            self._members = _find_engine_processes(self.pid)
        return True

    def continue_generation(self) -> bool:
        url = f"{self.url}/continue_generation"
        return responds_with_200("POST", url, _CONTINUE_TIMEOUT_S, key=self.keys.admin)

    def find_death_reason(self) -> str:
        """Why the server is dead, in words; empty while it lives.

        A server whose scheduler was killed lingers for up to a minute without one, so each
        scheduler and detokenizer that it had when it became ready must be there.
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
        """True when it could not bind its port: SGLang 0.5.23 says so, and neither serves nor ends.

        Its log may be on storage that all cells share, so it is read every two seconds at most.
        """
        if now < self._log_due_at:
            return False
        self._log_due_at = now + _LOG_READ_INTERVAL_S
        return self.lost_port_race()

    @property
    def has_usage_error(self) -> bool:
        return self._process.poll() == 2  # argparse's exit code

    def lost_port_race(self) -> bool:
        return any(sign in self.read_log_tail() for sign in _PORT_TAKEN_MESSAGES)

    def read_log_tail(self, lines: int = 25) -> str:
        text = read_tail_lines(self.log_path, _LOG_TAIL_BYTES).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def request_stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self, grace_s: float = 0.0) -> None:
        """End all its processes: by force after `grace_s`.

        One that a hanging driver or storage keeps from ending is left behind, with a line in the
        log: the manager has other replicas to look after.
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
    """A pipe and the file that gets what is written into it, as soon as the storage takes it.

    A server that wrote into a file on shared storage would stand still with that storage: none of
    its requests is answered then, and after `inference.health_timeout_s` it is taken for dead.
    """

    def __init__(self, path: Path) -> None:
        """Make the file, or go on with it."""
        make_folder(path.parent)
        self._path = path
        self._file: FileIO | None = path.open("ab", buffering=0)
        self._pieces: Queue[bytes] = Queue(_MAX_HELD_PIECES)
        self._read_end, self.write_end = os.pipe()
        """`write_end` is for the server; `start_copying` closes it here."""
        self._writer = threading.Thread(target=self._write_pieces, name="server-log", daemon=True)

    def start_copying(self) -> None:
        """Empty the pipe from now on: the server has its end of it."""
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
                self._close_file()  # another one may be better: this one may be stale
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
            # CAMEL's environment has a psutil that is older than the name.
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
    """The last sign of life of one server.

    SGLang's `/health_generate` comes back after a second when any token left the scheduler
    since it was asked, and after 20 s, with an error, when none did (sglang 0.5.23,
    `srt/entrypoints/http_server.py`). A paused server says no, so it must not be asked.
    """

    def __init__(self, url: str, timeout_s: float, clock: AwakeClock) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._probe: threading.Thread | None = None
        self._clock = clock
        self._asked_at = self._alive_at = clock.now()

    def check_silence(self, *, may_ask: bool) -> bool:
        """Ask if it is time to; true once the server has been silent for `timeout_s`.

        While an update is under way it may not be asked: the server then need not answer, and its
        silence counts from the end of the update, or of a pause of this process.
        """
        now = self._clock.now()
        self._alive_at = max(self._alive_at, self._clock.woke_at_s)
        if not may_ask:
            self._alive_at = now
            return False
        is_asking = self._probe is not None and self._probe.is_alive()
        if not is_asking and now >= self._asked_at + self._timeout_s / _PROBES_PER_TIMEOUT:
            self._asked_at = now
            self._probe = threading.Thread(target=self._probe_health, name="health", daemon=True)
            self._probe.start()
        return now - self._alive_at > self._timeout_s

    def _probe_health(self) -> None:
        if responds_with_200("GET", f"{self._url}/health_generate", self._timeout_s / 2):
            self._alive_at = self._clock.now()

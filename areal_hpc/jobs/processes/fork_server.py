"""Fork server of one process of a job: it imports the entry's module once and forks every start.

The imports of torch and Megatron take a rank seconds of processor time. A process that is forked
after them begins in milliseconds and shares their memory.

`fork` copies one thread, every lock that another thread holds, and a driver's state of the
devices. So before a fork nothing is computed, no Python thread runs, and CUDA is not initialized,
which `torch.cuda.is_available` does unless it is set to use NVML (PyTorch's notes on
multiprocessing, "Poison fork"). If an import breaks this, `is_fork_safe` notices it and the process
is started by `exec`, which is slower. OpenBLAS ends its threads by its own handler.

The server ignores stop signals, which are meant for the process, and dies with its supervisor. The
process gets SIGTERM when its server dies.
"""

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from areal_hpc.jobs.node import DEVICES_DIR
from areal_hpc.jobs.processes.process_main import PARENT_VARIABLE, PROCESS_MAIN, run_entry
from areal_hpc.jobs.processes.process_setup import STOP_SIGNALS, set_up_logging
from areal_hpc.jobs.processes.process_ties import die_with_parent

log = logging.getLogger(__name__)

FORK_SERVER_MAIN = "areal_hpc.jobs.processes.fork_server"
"""This module, for `python -m`."""
START_REQUEST = b"start"
PRELOAD_OPTION = "--preload="
_NVML_CHECK_VARIABLE = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that makes `torch.cuda.is_available` use NVML, which initializes nothing."""
_CUDA_DEVICE_FILE = "nvidia-uvm"
"""Device file that CUDA opens when it is initialized, and NVML does not."""


class ForkReply(msgspec.Struct, frozen=True):
    """Report of one start to the supervisor."""

    pid: int
    """Id of the process, which has begun and leads a session of its own."""
    exit_code: int | None = None
    """Exit code once the process and its session have ended; below 0 for a signal."""


def main() -> None:
    """Serve one supervisor until it closes the socket or dies; in a fork, run the entry."""
    entry = sys.argv[1].removeprefix(PRELOAD_OPTION)
    config_path, channel = Path(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
    die_with_parent(signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT_VARIABLE]):  # it died before the prctl
        sys.exit(75)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    set_up_logging()
    _preload_module(entry.partition(":")[0])
    is_safe, server = is_fork_safe(), os.getpid()
    if not is_safe:
        log.warning("importing %s left threads or an open GPU: nothing is forked", entry)
    if _fork_at_requests(channel):
        command = [sys.orig_argv[0], "-m", PROCESS_MAIN, entry, str(config_path)]
        _set_up_forked_process(command, channel, server)
        if not is_safe:
            os.execv(sys.executable, command)
        run_entry(entry, config_path, server)


def is_fork_safe(devices_dir: Path = DEVICES_DIR) -> bool:
    """Return whether this process has one Python thread and has not initialized CUDA."""
    return (
        threading.active_count() == 1 and devices_dir / _CUDA_DEVICE_FILE not in _list_open_files()
    )


def _list_open_files() -> list[Path]:
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            paths.append(link.readlink())
    return paths


def _preload_module(module: str) -> None:
    was_set = _NVML_CHECK_VARIABLE in os.environ
    os.environ.setdefault(_NVML_CHECK_VARIABLE, "1")
    try:
        importlib.import_module(module)
    except Exception as error:  # boundary: the forked process imports it again and reports it
        log.debug("%s cannot be imported: %s", module, error)
    if not was_set:
        del os.environ[_NVML_CHECK_VARIABLE]
    gc.collect()
    gc.freeze()  # a collection in a forked process would touch, and so copy, all objects


def _fork_at_requests(channel: socket.socket) -> bool:
    while channel.recv(len(START_REQUEST)):
        # A stop signal that comes before the new process can handle it must not be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        child = os.fork()
        if child == 0:
            return True
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its session, while the id is still taken
        _, status = os.waitpid(child, 0)
        channel.send(msgspec.json.encode(ForkReply(child, os.waitstatus_to_exitcode(status))))
    return False


def _set_up_forked_process(command: Sequence[str], channel: socket.socket, server_pid: int) -> None:
    os.setsid()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.environ[PARENT_VARIABLE] = str(server_pid)
    sys.argv = list(command[2:])
    set_process_title(command)
    channel.send(msgspec.json.encode(ForkReply(os.getpid())))
    channel.close()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def set_process_title(words: Sequence[str]) -> None:
    """Make `ps` show another command line if it is not longer than the current one.

    The kernel reads the command line from the process's memory, between two addresses in
    /proc/PID/stat.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    if begin and len(text) <= end - begin:
        ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    main()

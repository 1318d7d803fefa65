"""Program that sets limits on itself and becomes another one, within a sandbox.

Stands alone, with the standard library only: `launcher.py JSON PYTHON SCRIPT`. As the first process
of a sandbox it stays that, out of the program's reach, and ends with the program.
"""

import ctypes
import json
import math
import os
import resource
import signal
import sys

PR_SET_DUMPABLE = 4
MAX_PENDING_SIGNALS = 256


def main() -> None:
    limits = json.loads(sys.argv[1])
    if limits["is_init"]:
        # The program has the same user: only what is not dumpable is out of its reach (ptrace(2)).
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if child := os.fork():
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))
            end_with_child(child)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    set_resource_limits(limits)
    os.write(limits["report_fd"], b"1")
    os.close(limits["report_fd"])
    os.execv(sys.argv[2], [sys.argv[2], "-I", *sys.argv[3:]])


def end_with_child(child: int) -> None:
    """Wait for orphans and for the child, whose exit code becomes this process's."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def set_resource_limits(limits: dict[str, float]) -> None:
    """Time of a processor, memory, files and processes of this process and its children."""
    cpu_s = math.ceil(limits["time_s"])
    for which, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, int(limits["memory_bytes"]), int(limits["memory_bytes"])),
        (resource.RLIMIT_FSIZE, int(limits["output_bytes"]), int(limits["output_bytes"])),
        (resource.RLIMIT_NPROC, int(limits["processes"]), int(limits["processes"])),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS, MAX_PENDING_SIGNALS),
    ):
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


if __name__ == "__main__":
    main()

"""Child process of the sandbox: namespaces, limits, then the program.

Stands alone, with the standard library only: it is started by its path, in isolated mode.
Takes away the network and the other processes by namespaces where the kernel allows it
(unshare(2)), root's rights if it has them, and sets the limits of setrlimit(2). Then it becomes
the program.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
NOBODY_UID = 65534
"""The user that root becomes, also its group."""


def main() -> None:
    """Confine this process and become the program."""
    limits = json.loads(sys.argv[1])
    is_apart = isolate()
    if is_apart:  # only a child is in the new process namespace; when it ends, so does all in it
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY_UID)
        os.setuid(NOBODY_UID)
    set_limits(limits)
    python = find_interpreter()
    if python is None or not os.access(sys.argv[2], os.R_OK):
        sys.exit(f"user {os.geteuid()} may not read {sys.argv[2]}, or may run no python3")
    os.write(limits["report_fd"], b"1" if is_apart else b"0")
    os.close(limits["report_fd"])
    os.execv(python, [python, "-I", sys.argv[2]])


def isolate() -> bool:
    """Leave the network and the sight of other processes. False where the kernel refuses."""
    user, group, is_root = os.geteuid(), os.getegid(), os.geteuid() == 0
    flags = CLONE_NEWNET | CLONE_NEWPID | (0 if is_root else CLONE_NEWUSER)
    if ctypes.CDLL(None, use_errno=True).unshare(flags) != 0:
        return False
    if not is_root:  # files it makes need an owner: the same user, by the same number
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def find_interpreter() -> str | None:
    """The base of this environment, or the system's where this user may not run it.

    Not the environment's own, which would offer its packages.
    """
    choices = (os.path.realpath(sys.executable), shutil.which("python3"))
    return next((path for path in choices if path and os.access(path, os.X_OK)), None)


def set_limits(limits: dict[str, float]) -> None:
    """Time, memory, files and processes. The kernel counts processes by user, not by program."""
    cpu_s = math.ceil(limits["time_s"])
    processes = count_user_threads(os.geteuid()) + int(limits["processes"])
    for which, soft, hard in (
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
        (resource.RLIMIT_AS, int(limits["memory_bytes"]), int(limits["memory_bytes"])),
        (resource.RLIMIT_FSIZE, int(limits["output_bytes"]), int(limits["output_bytes"])),
        (resource.RLIMIT_NPROC, processes, processes),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        ceiling = resource.getrlimit(which)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        resource.setrlimit(which, (soft, hard))


def count_user_threads(user: int) -> int:
    """Threads that a (real) user has now, which is what RLIMIT_NPROC counts."""
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            lines = status.read_text().splitlines()
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
            if int(fields["Uid"].split()[0]) == user:
                count += int(fields["Threads"])
    return count


if __name__ == "__main__":
    main()

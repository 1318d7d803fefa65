"""What every sandbox has: folders, variables, accounts, and the Python of its command server.

That Python is one of this machine's, whatever root file system the sandbox has: started by this
machine's loader with this machine's libraries, all of them below `GUEST_DIR`, read-only.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.sandbox.bubblewrap_command_line import NOBODY_UID, find_sandbox_python
from areal_hpc.sandbox.seccomp import build_seccomp_filter
from areal_hpc.sandbox.spec import SESSION_PORT, SandboxSpec

GUEST_DIR = "/sandbox"
"""What a sandbox needs to run its server."""
LOWER_DIR = f"{GUEST_DIR}/root"
"""The root file system as it was, for comparison."""
SERVER_SCRIPTS = tuple(
    Path(__file__).parents[1] / name
    for name in ("command_server.py", "sandbox_files.py", "unpacked_tree.py")
)
"""The server, which is started, and what it imports."""
MAX_OPEN_FILES = 4096
WORK_DIR = "/workspace"
"""Working and home directory of commands, at first empty."""
GUEST_VARIABLES = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORK_DIR,
    "LC_ALL": "C.UTF-8",
    "TMPDIR": "/tmp",
    "USER": "nobody",
}
GUEST_ETC_FILES = {
    "passwd": f"nobody:x:{NOBODY_UID}:{NOBODY_UID}:nobody:{WORK_DIR}:/bin/sh\n",
    "group": f"nogroup:x:{NOBODY_UID}:\n",
    "hosts": "127.0.0.1 localhost\n",
}
"""Of a sandbox that shows this machine's programs: its accounts are nobody's business."""
_CANDIDATES = ("/media", "/srv", "/mnt", "/opt")
"""Folders that every distribution has (FHS 3.0); what covers one is seen by the runtime alone."""

LIMIT_KERNEL_OBJECTS_SCRIPT = """
for limit in inotify_instances=64 inotify_watches=16384 fanotify_groups=16 fanotify_marks=1024; do
  { echo "${limit#*=}" > "/proc/sys/user/max_${limit%=*}"; } 2> /dev/null || :
done
"""
"""What a user namespace may have of what its user has few of elsewhere, too."""


@dataclass(frozen=True, slots=True)
class GuestPython:
    """Folders and files of this machine by their places in a sandbox, and the words to start it."""

    binds: tuple[tuple[str, str], ...]
    """From, to."""
    command: tuple[str, ...]


def find_guest_python(*, by_anybody: bool) -> GuestPython:
    """The Python for a sandbox. `by_anybody`: any user of this machine must be able to run it.

    Raises:
        ClusterError: There is none.
    """
    found = find_sandbox_python(by_anybody=by_anybody)
    if found is None:
        raise ClusterError(
            f"user {NOBODY_UID} may run no python3 of this machine",
            hint="install the distribution's python3, or do not start the run as root",
        )
    python, prefix = os.path.realpath(found[0]), found[1] or "/usr"
    loader, folders = _find_libraries()
    binds = [(prefix, f"{GUEST_DIR}/python"), (loader, f"{GUEST_DIR}/loader")]
    places = []
    for number, folder in enumerate(folders):
        places.append(f"{GUEST_DIR}/lib{number}")
        binds.append((folder, places[-1]))
    within = f"{GUEST_DIR}/python/{Path(python).relative_to(prefix)}"
    options = ("--library-path", ":".join(places), within, "-I", "-S")
    return GuestPython(tuple(binds), (f"{GUEST_DIR}/loader", *options))


def build_command_server_command(
    spec: SandboxSpec,
    python: Sequence[str],
    script: str,
    *,
    writable_folders: Sequence[str],
    counts_processes: bool,
    origin: str = "/",
    channel_fd: int | None = None,
    filters_calls: bool = False,
) -> list[str]:
    """The command line of a sandbox's server.

    Args:
        spec: What the sandbox is to be.
        python: The words that start Python there.
        script: The place of the server there.
        writable_folders: Folders that a snapshot looks through.
        counts_processes: The kernel counts the processes of this sandbox alone.
        origin: The folder that paths in a snapshot are relative to.
        channel_fd: The channel; None: standard input and output.
        filters_calls: The server has to refuse system calls to itself and commands.
    """
    program_filter = build_seccomp_filter() if filters_calls else None
    request = {
        "limits": asdict(spec.limits)
        | {"open_files": MAX_OPEN_FILES, "counts_processes": counts_processes},
        "channel_fd": channel_fd,
        "session_port": SESSION_PORT if spec.network == "session-only" else None,
        "writable": list(writable_folders),
        "origin": origin,
        "lower": None if spec.root is None else LOWER_DIR,
        "filter": None if program_filter is None else program_filter.hex(),
    }
    return [*python, script, json.dumps(request)]


def _find_libraries() -> tuple[str, list[str]]:
    mapped = {
        os.path.realpath(line.split(maxsplit=5)[5].strip())
        for line in Path("/proc/self/maps").read_text().splitlines()
        if ".so" in line
    }
    loader = next((path for path in mapped if Path(path).name.startswith("ld-")), None)
    folders = {str(Path(path).parent) for path in mapped if Path(path).name.startswith("libc.")}
    if loader is None or not folders:
        raise ClusterError("this Python is linked to no C library of the system's")
    return loader, sorted(folders)


def choose_scratch_mount_point(used_paths: Sequence[str]) -> str:
    """A folder that may be covered: nothing that the sandbox is made of lies in it."""
    for place in _CANDIDATES:
        if Path(place).is_dir() and not any(Path(one).is_relative_to(place) for one in used_paths):
            return place
    raise ClusterError(
        f"none of {', '.join(_CANDIDATES)} can hold the files of a sandbox on this machine",
        hint="move the root file system out of them",
    )

"""What every sandbox has: folders, variables, accounts, and the Python of its command server.

That Python is one of this machine's, whatever root file system the sandbox has: started by this
machine's loader with this machine's libraries, all of them below `GUEST_DIR`, read-only.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.sandbox.images import unpack_root
from areal_hpc.sandbox.sandbox import (
    SESSION_PORT,
    Sandbox,
    SandboxLimits,
    SandboxSpec,
    SandboxStartPlan,
)
from areal_hpc.sandbox.seccomp import build_seccomp_filter

ISOLATION_RECIPE_KEY = "rollout.agent.isolation"
NOBODY_UID = 65534
"""The user that a sandbox has, also its group."""
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
"""What of this machine's a sandbox without a root file system shows, beside `/usr`."""
GUEST_DIR = "/sandbox"
"""What a sandbox needs to run its server."""
SERVER_SCRIPTS = tuple(
    Path(__file__).with_name(name) for name in ("command_server.py", "sandbox_files.py")
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
_ETC_FILES = {
    "/etc/passwd": f"nobody:x:{NOBODY_UID}:{NOBODY_UID}:nobody:{WORK_DIR}:/bin/sh\n",
    "/etc/group": f"nogroup:x:{NOBODY_UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
"""Of a sandbox that shows this machine's programs: its accounts are nobody's business."""
_SCRATCH_CANDIDATES = ("/media", "/srv", "/mnt", "/opt")
"""Folders that every distribution has (FHS 3.0); what covers one is seen by the runtime alone."""


@dataclass(frozen=True, slots=True)
class Guest:
    """What a sandbox is made of on this machine, whatever program starts it."""

    spec: SandboxSpec
    """Its root is a folder, or None."""
    python: Sequence[str]
    """The words that start the server's Python there."""
    readonly: Sequence[tuple[str, str]]
    """Folders and files of this machine that it shows, and where."""
    links: Mapping[str, str]
    """Links by place."""
    files: Mapping[str, bytes]
    """Content by place."""
    scratch: str
    """Folder of this machine that a file system in memory covers: it holds all that is written."""
    user: int | None
    """Who starts it; None: whoever runs this."""

    @classmethod
    async def prepare(cls, spec: SandboxSpec, *program_paths: Path) -> "Guest":
        """Unpack its root, and find what it shows beside `program_paths`, which start it."""
        user = NOBODY_UID if may_become_nobody() else None
        spec = await unpack_root(spec, user)
        binds, python = _find_guest_python()
        files = {f"{GUEST_DIR}/{one.name}": one.read_bytes() for one in SERVER_SCRIPTS}
        files |= {f"{GUEST_DIR}/{name}": content for name, content in spec.files.items()}
        shared, links = ["/etc/resolv.conf"] if spec.network == "open" else [], dict[str, str]()
        if spec.root is None:
            shared += ["/etc/ssl", "/etc/pki"] if shared else []
            system, links = find_system_places()
            binds = [*system, *binds]
            files |= {place: text.encode() for place, text in _ETC_FILES.items()}
        binds += ((os.path.realpath(one), one) for one in shared if Path(one).exists())
        binds += ((one, one) for one in spec.readonly_folders)
        used = [*map(str, program_paths), str(spec.root or ""), *(source for source, _ in binds)]
        scratch = choose_scratch_mount_point(used)
        return cls(spec, python, binds, links, files, scratch, user)

    @property
    def writable(self) -> Iterator[tuple[str, str]]:
        """Names below the scratch folder that are shown to be written in, and where.

        A root file system is written over as a whole.
        """
        yield "shm", "/dev/shm"
        if self.spec.root is None:
            yield from (("workspace", WORK_DIR), ("tmp", "/tmp"))
            for number, folder in enumerate(self.spec.writable_folders):
                yield f"folder{number}", folder

    def build_server_command(self, channel_fd: int = 0) -> list[str]:
        return build_server_command(self.spec, self.python, channel_fd=channel_fd)

    async def start(
        self,
        command: Sequence[str],
        pass_fds: Sequence[int],
        process_environ: Mapping[str, str] | None = None,
    ) -> Sandbox:
        """Start the process that the sandbox lives in."""
        return await Sandbox.start(
            SandboxStartPlan(
                command,
                WORK_DIR,
                self.spec.limits,
                {**GUEST_VARIABLES, **self.spec.variables},
                pass_fds=pass_fds,
                user=self.user,
                process_environ=process_environ,
            )
        )


def may_become_nobody() -> bool:
    """True for root, but not where the user namespace of a container maps no other user."""
    if os.geteuid() != 0:
        return False
    ranges = (
        map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()
    )
    return any(first <= NOBODY_UID < first + count for first, _, count in ranges)


def is_executable_by_all(path: Path) -> bool:
    return all(one.stat().st_mode & 0o001 for one in (path, *path.parents))


def require_python() -> tuple[str, str | None]:
    """Find a Python for sandboxes; its folder, None for one in /usr.

    It is the base of this environment, whose packages a program is not offered; the system's where
    a user without rights could not run that, if programs become one.
    """
    prefix = os.path.realpath(sys.base_prefix)
    own = os.path.realpath(sys.executable)
    by_anybody = may_become_nobody()
    if Path(own).is_relative_to(prefix) and (not by_anybody or is_executable_by_all(Path(own))):
        return own, None if Path(prefix).is_relative_to("/usr") else prefix
    found = shutil.which("python3", path="/usr/bin:/bin")
    if found is None:
        raise ClusterError(
            f"user {NOBODY_UID} may run no python3 of this machine",
            hint="install the distribution's python3, or do not start the run as root",
        )
    return found, None


def _find_guest_python() -> tuple[list[tuple[str, str]], list[str]]:
    """What a sandbox shows for the Python of its server, and where; the words that start it."""
    found = require_python()
    python, prefix = os.path.realpath(found[0]), found[1] or "/usr"
    loader, folders = _find_libraries()
    places = [f"{GUEST_DIR}/lib{number}" for number in range(len(folders))]
    binds = [(prefix, f"{GUEST_DIR}/python"), (loader, f"{GUEST_DIR}/loader")]
    binds += zip(folders, places, strict=True)
    within = f"{GUEST_DIR}/python/{Path(python).relative_to(prefix)}"
    return binds, [
        *(f"{GUEST_DIR}/loader", "--library-path", ":".join(places)),
        *(within, "-I", "-S"),
    ]


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


def find_system_places() -> tuple[list[tuple[str, str]], dict[str, str]]:
    """This machine's programs, and where a sandbox shows them; its links to them."""
    links = {name: str(Path(name).readlink()) for name in _SYSTEM_LINKS if Path(name).is_symlink()}
    names = (*_SYSTEM_LINKS, *_SYSTEM_FILES)
    shown = [name for name in names if name not in links and Path(name).exists()]
    return [("/usr", "/usr"), *((os.path.realpath(name), name) for name in shown)], links


def build_server_command(
    spec: SandboxSpec, python: Sequence[str], *, channel_fd: int = 0, host_folder: str = ""
) -> list[str]:
    """The command line of a sandbox's server.

    Args:
        spec: What the sandbox is to be.
        python: The words that start Python there.
        channel_fd: The channel.
        host_folder: Where the server is, of commands that nothing isolates.
    """
    program_filter = None if host_folder else build_seccomp_filter()
    request = {
        "limits": asdict(spec.limits)
        | {"open_files": MAX_OPEN_FILES, "counts_processes": not host_folder},
        "channel_fd": channel_fd,
        "session_port": SESSION_PORT if spec.network == "session-only" else None,
        "filter": None if program_filter is None else program_filter.hex(),
    }
    script = f"{host_folder}{GUEST_DIR}/{SERVER_SCRIPTS[0].name}"
    return [*python, script, json.dumps(request)]


def build_kernel_limits_script(limits: SandboxLimits) -> str:
    """The words by which a user namespace limits what its user has few of elsewhere, too."""
    values = {
        "inotify_instances": limits.inotify_instances,
        "inotify_watches": 16384,
        "fanotify_groups": 16,
        "fanotify_marks": 1024,
    }
    lines = (
        f"{{ echo {value} > /proc/sys/user/max_{name}; }} 2> /dev/null || :\n"
        for name, value in values.items()
    )
    return "".join(lines)


def choose_scratch_mount_point(used_paths: Iterable[str]) -> str:
    """A folder that may be covered: nothing that the sandbox is made of lies in it."""
    used = [*used_paths]
    for place in _SCRATCH_CANDIDATES:
        if Path(place).is_dir() and not any(Path(one).is_relative_to(place) for one in used):
            return place
    raise ClusterError(
        f"none of {', '.join(_SCRATCH_CANDIDATES)} can hold the files of a sandbox on this machine",
        hint="move the root file system out of them",
    )


def build_isolation_error(program: str, reason: str, hint: str) -> RecipeError:
    """The error of a program that cannot isolate an agent's commands on this machine."""
    return RecipeError(
        f"{program} cannot isolate on this machine: {reason}",
        key=ISOLATION_RECIPE_KEY,
        hint=hint,
    )

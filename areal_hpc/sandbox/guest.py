"""Contents of every sandbox: folders, variables, accounts, and the Python of its command server.

With any root file system that Python is one of this machine's, started by this machine's loader
with this machine's libraries, all of them read-only below `GUEST_DIR`.
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
"""User and group of the processes in a sandbox."""
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
"""Files of this machine that a sandbox without a root file system shows, beside `/usr`."""
GUEST_DIR = "/sandbox"
"""Folder in a sandbox with its command server and the files shown to commands."""
SERVER_SCRIPTS = tuple(
    Path(__file__).with_name(name) for name in ("command_server.py", "sandbox_files.py")
)
"""Program of the command server, and the module that it imports."""
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
"""Contents of `/etc` without a root file system, as this machine's accounts are not shown."""
_SCRATCH_CANDIDATES = ("/media", "/srv", "/mnt", "/opt")
"""Folders that every distribution has (FHS 3.0); only the runtime sees a mount over one."""


@dataclass(frozen=True, slots=True)
class Guest:
    """Contents of a sandbox on this machine, for every program that starts one."""

    spec: SandboxSpec
    """Spec of the sandbox, whose root is a folder or None."""
    python: Sequence[str]
    """Words that start the server's Python in the sandbox."""
    readonly: Sequence[tuple[str, str]]
    """Folders and files of this machine that it shows, and their paths in it."""
    links: Mapping[str, str]
    """Targets of symbolic links, by path."""
    files: Mapping[str, bytes]
    """Contents of files, by path."""
    scratch: str
    """Folder of this machine over which a file system in memory is mounted for all writes."""
    user: int | None
    """User who starts it; None: the caller's."""

    @classmethod
    async def prepare(cls, spec: SandboxSpec, *program_paths: Path) -> "Guest":
        """Unpack the root, and find all that the sandbox shows; `program_paths` start it."""
        user = NOBODY_UID if may_become_nobody() else None
        spec = await unpack_root(spec, user)
        binds, python = _find_guest_python()
        files = {f"{GUEST_DIR}/{script.name}": script.read_bytes() for script in SERVER_SCRIPTS}
        files |= {f"{GUEST_DIR}/{name}": content for name, content in spec.files.items()}
        shared, links = ["/etc/resolv.conf"] if spec.network == "open" else [], dict[str, str]()
        if spec.root is None:
            shared += ["/etc/ssl", "/etc/pki"] if shared else []
            system, links = find_system_places()
            binds = [*system, *binds]
            files |= {path: text.encode() for path, text in _ETC_FILES.items()}
        binds += ((os.path.realpath(path), path) for path in shared if Path(path).exists())
        binds += ((folder, folder) for folder in spec.readonly_folders)
        sources = [*map(str, program_paths), str(spec.root or ""), *(source for source, _ in binds)]
        scratch = choose_scratch_mount_point(sources)
        return cls(spec, python, binds, links, files, scratch, user)

    @property
    def writable(self) -> Iterator[tuple[str, str]]:
        """Writable folders: their names below the scratch folder, and their paths in the sandbox.

        A root file system is writable as a whole.
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
        """Start the sandbox's process."""
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
    """Return whether this process is root, in a user namespace that maps `NOBODY_UID`."""
    if os.geteuid() != 0:
        return False
    ranges = (
        map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()
    )
    return any(first <= NOBODY_UID < first + count for first, _, count in ranges)


def is_executable_by_all(path: Path) -> bool:
    return all(step.stat().st_mode & 0o001 for step in (path, *path.parents))


def require_python() -> tuple[str, str | None]:
    """Find a Python for sandboxes; return its path, and its folder or None for one in /usr.

    It is the base of this environment, without the environment's packages; or the system's if
    programs become user 65534, and that user could not run the base.
    """
    prefix = os.path.realpath(sys.base_prefix)
    base = os.path.realpath(sys.executable)
    as_nobody = may_become_nobody()
    if Path(base).is_relative_to(prefix) and (not as_nobody or is_executable_by_all(Path(base))):
        return base, None if Path(prefix).is_relative_to("/usr") else prefix
    system = shutil.which("python3", path="/usr/bin:/bin")
    if system is None:
        raise ClusterError(
            f"user {NOBODY_UID} may run no python3 of this machine",
            hint="install the distribution's python3, or do not start the run as root",
        )
    return system, None


def _find_guest_python() -> tuple[list[tuple[str, str]], list[str]]:
    """List the binds of the server's Python, and the words that start it in the sandbox."""
    base = require_python()
    python, prefix = os.path.realpath(base[0]), base[1] or "/usr"
    loader, folders = _find_libraries()
    library_folders = [f"{GUEST_DIR}/lib{number}" for number in range(len(folders))]
    binds = [(prefix, f"{GUEST_DIR}/python"), (loader, f"{GUEST_DIR}/loader")]
    binds += zip(folders, library_folders, strict=True)
    program = f"{GUEST_DIR}/python/{Path(python).relative_to(prefix)}"
    return binds, [
        *(f"{GUEST_DIR}/loader", "--library-path", ":".join(library_folders)),
        *(program, "-I", "-S"),
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
    """List the binds of this machine's programs, and the symbolic links to them by path."""
    links = {name: str(Path(name).readlink()) for name in _SYSTEM_LINKS if Path(name).is_symlink()}
    names = (*_SYSTEM_LINKS, *_SYSTEM_FILES)
    existing = [name for name in names if name not in links and Path(name).exists()]
    return [("/usr", "/usr"), *((os.path.realpath(name), name) for name in existing)], links


def build_server_command(
    spec: SandboxSpec, python: Sequence[str], *, channel_fd: int = 0, host_folder: str = ""
) -> list[str]:
    """Build the command line of a sandbox's server.

    Args:
        spec: Spec of the sandbox.
        python: Words that start Python in the sandbox.
        channel_fd: Descriptor of the channel.
        host_folder: Folder above the server's if commands run without isolation.
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
    """Build shell lines that limit, in a user namespace, what the kernel counts by user."""
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
    """Choose a folder to mount over: one that contains no path that the sandbox uses."""
    paths = [*used_paths]
    for folder in _SCRATCH_CANDIDATES:
        if Path(folder).is_dir() and not any(Path(path).is_relative_to(folder) for path in paths):
            return folder
    raise ClusterError(
        f"none of {', '.join(_SCRATCH_CANDIDATES)} can hold the files of a sandbox on this machine",
        hint="move the root file system out of them",
    )


def build_isolation_error(program: str, reason: str, hint: str) -> RecipeError:
    """Build the error for a program that cannot isolate an agent's commands on this machine."""
    return RecipeError(
        f"{program} cannot isolate on this machine: {reason}",
        key=ISOLATION_RECIPE_KEY,
        hint=hint,
    )

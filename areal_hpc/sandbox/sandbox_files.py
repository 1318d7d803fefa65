"""Files of a sandbox, read and written by its command server; standard library only.

What a sandbox changed travels as a layer of an OCI image: a tar of what was written, with an empty
file `.wh.NAME` for what was removed.
"""

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16
WHITEOUT_PREFIX = ".wh."


def run_file_operation(request: dict[str, Any], server: dict[str, Any]) -> None:
    """Do what a request asks, between a file or all of them and standard input or output."""
    match request["operation"]:
        case "put":
            write_stdin_to_file(request["path"], request["mode"])
        case "get":
            write_file_to_stdout(request["path"])
        case "remove":
            remove_all(request["path"])
        case "pack":
            pack_changes_to_stdout(server["origin"], server["writable"], server["lower"])
        case "unpack":
            unpack_changes_from_stdin(server["origin"], request["keeps_links"])


def write_stdin_to_file(path: str, mode: int) -> None:
    """Write standard input into a file; its folders are made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    require_regular_file(descriptor, path)
    copy_to_end(0, descriptor)
    os.fchmod(descriptor, mode)


def write_file_to_stdout(path: str) -> None:
    """Write a file to standard output."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    require_regular_file(descriptor, path)
    copy_to_end(descriptor, 1)


def remove_all(path: str) -> None:
    """Remove a file or a folder; of a folder that is a mount only what is in it."""
    if not Path(path).is_dir() or Path(path).is_symlink():
        Path(path).unlink(missing_ok=True)
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        Path(path).chmod(0o700)  # one may be closed to its owner too
    for entry in os.scandir(path):
        remove_all(entry.path)
    if os.path.realpath(path) not in read_mount_points():  # of the same device, perhaps
        Path(path).rmdir()


def copy_to_end(source_fd: int, target_fd: int) -> None:
    """Copy from one descriptor to another, to the end."""
    while piece := os.read(source_fd, CHUNK_BYTES):
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(target_fd, rest) :]


def require_regular_file(descriptor: int, path: str) -> None:
    """Raise unless it is a file: a pipe or a device could hold a reader up for ever."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(f"{path} is no regular file")


def pack_changes_to_stdout(origin: str, writable_folders: list[str], lower_dir: str | None) -> None:
    """Write all that was written or removed to standard output, as a layer of an OCI image.

    Names are relative to `origin`; `lower_dir` is the root file system as it was.
    """

    def name_member(path: str) -> str:
        return path.removeprefix(origin).lstrip("/")

    skipped = {*read_mount_points(), "/proc", "/dev", "/sys", "/sandbox"} - set(writable_folders)
    with tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        pending = list(writable_folders)
        while pending:
            folder = pending.pop()
            below = None if lower_dir is None else lower_dir + folder.rstrip("/")
            names = {entry.name: entry for entry in os.scandir(folder)}
            for name, entry in names.items():
                if entry.path in skipped or name.startswith(WHITEOUT_PREFIX):
                    continue
                former = None if below is None else f"{below}/{name}"
                if has_changed(entry.path, former):
                    archive.add(entry.path, name_member(entry.path), recursive=False)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
            for name in list_removed_names(names, below):
                mark = tarfile.TarInfo(name_member(f"{folder}/{WHITEOUT_PREFIX}{name}"))
                archive.addfile(mark)


def read_mount_points() -> Iterator[str]:
    """Folders and files on which something is mounted."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        yield line.split()[4].decode("unicode_escape")


def has_changed(path: str, former_path: str | None) -> bool:
    """True if a file is another one than that of the root file system; sockets never count."""
    now = os.lstat(path)
    if stat.S_ISSOCK(now.st_mode):
        return False
    try:
        then = None if former_path is None else os.lstat(former_path)
    except OSError:
        then = None
    if then is None or now.st_mode != then.st_mode:
        return True
    if stat.S_ISDIR(now.st_mode):
        return False
    if stat.S_ISLNK(now.st_mode):
        return Path(path).readlink() != Path(str(former_path)).readlink()
    return (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns)


def list_removed_names(names: dict[str, Any], lower_path: str | None) -> list[str]:
    """Names of a folder of the root file system that are no longer there."""
    try:
        former = [] if lower_path is None else list(os.scandir(lower_path))
    except OSError:  # the folder is new
        return []
    return [entry.name for entry in former if entry.name not in names]


def unpack_changes_from_stdin(origin: str, keeps_links: bool) -> None:
    """Read from standard input what `pack_changes_to_stdout` wrote, and make it so.

    `keeps_links`: where a folder is wanted, a link to one will do.
    """
    extra: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "tar_filter") else {}
    modes = {}
    with tarfile.open(fileobj=os.fdopen(0, "rb"), mode="r|") as archive:
        for member in archive:
            folder, _, name = f"{origin.rstrip('/')}/{member.name}".rpartition("/")
            if not name.startswith(WHITEOUT_PREFIX):
                clear_path_for_member(f"{folder}/{name}", member, keeps_links)
                archive.extract(member, origin, set_attrs=not member.isdir(), **extra)
                if member.isdir():
                    modes[f"{folder}/{name}"] = member.mode
                continue
            remove_all(f"{folder}/{name.removeprefix(WHITEOUT_PREFIX)}")
    for folder in reversed(modes):  # only now: one may be closed to its owner too
        Path(folder).chmod(modes[folder])


def clear_path_for_member(path: str, tar_member: tarfile.TarInfo, keeps_links: bool) -> None:
    """Remove what lies where a member comes: a file may be closed to its owner, or lead elsewhere.

    A folder stays where one comes.
    """
    if tar_member.isdir() and Path(path).is_dir() and (keeps_links or not Path(path).is_symlink()):
        return
    remove_all(path)

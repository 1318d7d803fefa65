"""File operations of the command server in a sandbox; imports the standard library alone."""

import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 16


def run_file_operation(request: dict[str, Any]) -> None:
    """Run the operation of a request, between a path and standard input or output."""
    path = request["path"]
    match request["operation"]:
        case "put":
            write_stdin_to_file(path, request["mode"])
        case "get":
            write_file_to_stdout(path, request["max_bytes"])
        case "remove":
            remove_all(path)
        case "pack":
            pack_folder_to_stdout(path, request["patterns"])
        case "unpack":
            unpack_stdin(path)


def write_stdin_to_file(path: str, mode: int) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    require_regular_file(descriptor, path)
    copy_to_end(0, descriptor)
    os.fchmod(descriptor, mode)


def write_file_to_stdout(path: str, max_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    require_regular_file(descriptor, path)
    if os.fstat(descriptor).st_size > max_bytes:
        raise OSError(f"it is longer than {max_bytes} bytes")
    copy_to_end(descriptor, 1)


def copy_to_end(source_fd: int, target_fd: int) -> None:
    while piece := os.read(source_fd, CHUNK_BYTES):
        rest = memoryview(piece)
        while rest:
            rest = rest[os.write(target_fd, rest) :]


def require_regular_file(descriptor: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(f"{path} is no regular file")


def remove_all(path: str) -> None:
    """Remove a file or a folder; a folder that is a mount point is only emptied."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        Path(path).unlink()
        return
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        Path(path).chmod(0o700)  # its mode may exclude even its owner
    for entry in os.scandir(path):
        remove_all(entry.path)
    if os.path.realpath(path) not in read_mount_points():  # some have the device of their parent
        Path(path).rmdir()


def read_mount_points() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        yield line.split()[4].decode("unicode_escape")


def pack_folder_to_stdout(path: str, patterns: list[str] | None) -> None:
    """Write a folder to standard output as a tar: all of it, or the plain files of patterns."""
    with tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|", format=tarfile.PAX_FORMAT) as archive:
        if patterns is None:
            archive.add(path, ".")
            return
        for file in sorted({file for pattern in patterns for file in Path(path).glob(pattern)}):
            if file.is_file() and not file.is_symlink():
                archive.add(file, file.relative_to(path))


def unpack_stdin(folder: str) -> None:
    """Unpack a tar from standard input; a link to a folder stands for a folder of the tar."""
    modes: dict[str, int] = {}
    with tarfile.open(fileobj=os.fdopen(0, "rb"), mode="r|") as archive:
        for member in archive:
            target = Path(folder, member.name)
            if member.isdir():
                if not target.is_dir():
                    remove_all(str(target))
                    target.mkdir(parents=True)
                modes[str(target)] = member.mode
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_all(str(target))
            if member.issym():
                target.symlink_to(member.linkname)
            elif member.islnk():
                target.hardlink_to(Path(folder, member.linkname))
            elif (content := archive.extractfile(member)) is not None:
                with target.open("xb") as file:
                    shutil.copyfileobj(content, file)
                os.utime(target, (member.mtime, member.mtime))
                target.chmod(member.mode)
    for path, mode in sorted(modes.items(), reverse=True):  # innermost first
        Path(path).chmod(mode)

"""Files of a sandbox, read and written by its command server; standard library only.

What a sandbox changed travels as a layer of an OCI image: a tar of what was written, with an empty
file `.wh.NAME` for what was removed.
"""

import errno
import importlib
import io
import os
import stat
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_hpc.sandbox import unpacked_tree
else:  # it lies beside this file, of a sandbox that has no package
    sys.path.insert(0, str(Path(__file__).parent))
    unpacked_tree = importlib.import_module("unpacked_tree")

CHUNK_BYTES = 1 << 16
WHITEOUT_PREFIX = unpacked_tree.WHITEOUT_PREFIX
_TAR_BLOCK_BYTES = 512


def run_file_operation(request: dict[str, Any], server: dict[str, Any]) -> None:
    """Do what a request asks, between a file or all of them and standard input or output."""
    match request["operation"]:
        case "put":
            write_stdin_to_file(request["path"], request["mode"])
        case "get":
            write_file_to_stdout(request["path"], request["max_bytes"])
        case "remove":
            unpacked_tree.remove_all(request["path"])
        case "pack":
            pack_changes_to_stdout(server["origin"], server["writable"], server["lower"])
        case "pack_folder":
            pack_folder_to_stdout(request["path"])
        case "unpack":
            unpack_stdin(request["path"] or server["origin"], request, server["limits"])


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


def pack_changes_to_stdout(origin: str, writable_folders: list[str], lower_dir: str | None) -> None:
    """Write all that was written or removed to standard output, as a layer of an OCI image.

    Names are relative to `origin`; `lower_dir` is the root file system as it was.
    """

    def name_member(path: str) -> str:
        return path.removeprefix(origin).lstrip("/")

    skipped = {*unpacked_tree.read_mount_points(), "/proc", "/dev", "/sys", "/sandbox"}
    skipped -= set(writable_folders)
    with open_stdout_as_tar() as archive:
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
                    add_file(archive, entry.path, name_member(entry.path))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
            for name in list_removed_names(names, below):
                mark = tarfile.TarInfo(name_member(f"{folder}/{WHITEOUT_PREFIX}{name}"))
                archive.addfile(mark)


def pack_folder_to_stdout(path: str) -> None:
    """Write what is in a folder to standard output, as a tar."""
    with open_stdout_as_tar() as archive:
        pending = [path]
        while pending:
            for entry in os.scandir(pending.pop()):
                add_file(archive, entry.path, os.path.relpath(entry.path, path))
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)


def open_stdout_as_tar() -> tarfile.TarFile:
    return tarfile.open(fileobj=os.fdopen(1, "wb"), mode="w|", format=tarfile.PAX_FORMAT)


def add_file(archive: tarfile.TarFile, path: str, member_name: str) -> None:
    """Add a file, a folder or a link; of a sparse file what it holds (GNU tar's format 1.0)."""
    member: tarfile.TarInfo | None = archive.gettarinfo(path, member_name)
    if member is None or not member.isfile():
        if member is not None and (member.isdir() or member.issym() or member.islnk()):
            archive.addfile(member)
        return
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        parts = list_data_parts(file.fileno(), member.size)
        held = sum(size for _, size in parts)
        if held == member.size:
            archive.addfile(member, file)
            return
        fields = [str(one) for one in (len(parts), *(x for part in parts for x in part))]
        listed = "".join(f"{one}\n" for one in fields).encode()
        listed += bytes(-len(listed) % _TAR_BLOCK_BYTES)
        member.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": member_name,
            "GNU.sparse.realsize": str(member.size),
        }
        member.size = len(listed) + held
        archive.addfile(member, SparseReader(file, listed, parts))


def list_data_parts(descriptor: int, size: int) -> list[tuple[int, int]]:
    """Offsets and sizes of what a file holds between its holes."""
    parts, place = list[tuple[int, int]](), 0
    try:
        while place < size:
            begin = os.lseek(descriptor, place, os.SEEK_DATA)
            place = os.lseek(descriptor, begin, os.SEEK_HOLE)
            parts.append((begin, place - begin))
    except OSError as error:
        if error.errno != errno.ENXIO:  # no more data; another: this file system does not tell
            parts = [(0, size)]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return parts


class SparseReader(io.RawIOBase):
    """The parts of a file, after the list of them."""

    def __init__(self, file: Any, listed: bytes, parts: list[tuple[int, int]]) -> None:
        self._file, self._listed, self._parts = file, listed, list(reversed(parts))

    def read(self, size: int = -1) -> bytes:
        """As of any stream, of which tarfile asks what it wants."""
        taken, self._listed = self._listed[:size], self._listed[size:]
        while len(taken) < size and self._parts:
            offset, left = self._parts.pop()
            self._file.seek(offset)
            piece = self._file.read(min(left, size - len(taken)))
            taken += piece
            if len(piece) < left and piece:
                self._parts.append((offset + len(piece), left - len(piece)))
        return taken


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


def unpack_stdin(folder: str, request: dict[str, Any], limits: dict[str, int]) -> None:
    """Write what a tar on standard input has, and remove what it says as a layer of an image."""
    tree = unpacked_tree.UnpackedTree(
        Path(folder),
        max_bytes=limits["disk_bytes"],
        max_files=limits["files"],
        follows_links=request["keeps_links"],
    )
    tree.write_archive(os.fdopen(0, "rb"), is_layer=request["is_layer"])
    tree.apply_folder_modes()

"""Mount of shared storage on one node, with the rules and the faults of a network file system.

A program: `python -m tests.support.network_storage FOLDER MOUNTPOINT` passes everything through to
a folder. Several of them over one folder are the nodes of a cluster, each with a cache of its own,
as NFS has it with its usual options: attributes, names and the absence of names are cached for 3 to
60 s (directories 30 to 60), opening a file reads its attributes, appending writes at the cached end
of the file, and a file that another node has removed is ESTALE.

It takes orders as JSON lines on its standard input (see `Order`), and ends, unmounted, with it.
"""

import fcntl
import json
import os
import random
import stat as kinds
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from errno import EAGAIN, EIO, ENOSYS, ESTALE, errorcode
from pathlib import Path
from typing import Literal

from tests.support.fuse_channel import (
    CACHE_DIR,
    KEEP_CACHE,
    OPEN_OUT,
    ROOT_NODE,
    STATFS_OUT,
    WITHOUT_REPLY,
    FuseChannel,
    Opcode,
    Request,
    pack_attributes_reply,
    pack_directory_entry,
    pack_entry,
    pack_no_entry,
)

FILE_CACHED_S, DIRECTORY_CACHED_S = (3.0, 60.0), (30.0, 60.0)
"""NFS: acregmin to acregmax, acdirmin to acdirmax."""
_OWN_FLAGS = os.O_APPEND | os.O_DIRECT | os.O_NOFOLLOW
"""Flags of OPEN that the kernel has seen to, or that NFS does not know."""
_MODE, _UID, _GID, _SIZE_PATTERN, _ATIME, _MTIME, _HANDLE, _ATIME_NOW, _MTIME_NOW = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 256),
)
"""Fields that SETATTR has to set."""
_SETATTR = struct.Struct("<IIQQQQQQIIIIIIII")
_READ = struct.Struct("<QQII16x")
_LOCK = struct.Struct("<QQQQIIII")
_IS_FLOCK = 1
Fate = Literal["not", "half", "all"]
"""Part of a request that was carried out."""
CHANGES = frozenset(
    [
        *(Opcode.CREATE, Opcode.WRITE, Opcode.RENAME, Opcode.LINK, Opcode.UNLINK),
        *(Opcode.MKDIR, Opcode.SETATTR),
    ]
)
"""Requests that may be carried out although their answer is lost."""
MAY_FAIL = CHANGES | {
    *(Opcode.LOOKUP, Opcode.GETATTR, Opcode.OPEN, Opcode.READ, Opcode.FSYNC, Opcode.FLUSH),
    *(Opcode.OPENDIR, Opcode.READDIR, Opcode.FSYNCDIR),
}


@dataclass
class Weather:
    """Faults to make, and counts of those made so far."""

    failure_rate: float = 0.0
    """Share of requests that fail, of those that may. Half of them are ESTALE, half EIO."""
    hangs_until: float = 0.0
    chance: random.Random = field(default_factory=random.Random)
    counts: Counter[str] = field(default_factory=Counter)

    def strike(self) -> int:
        """The error that a request gets now; 0 for none."""
        if self.chance.random() >= self.failure_rate:
            return 0
        return self.chance.choice((EIO, ESTALE))

    def choose_fate(self, opcode: int) -> Fate:
        """Choose the part of a request that is carried out, if its answer is an error."""
        if opcode not in CHANGES:
            return "not"
        return self.chance.choice(
            ("not", "half", "all") if opcode == Opcode.WRITE else ("not", "all")
        )


@dataclass
class Node:
    """A file or directory that the kernel knows by number."""

    fd: int
    """An O_PATH descriptor: it follows renames."""
    key: tuple[int, int]
    lookups: int = 0
    removed_here: bool = False
    """This node removed the file: it keeps open ones, as NFS does by silly renames."""


@dataclass
class Handle:
    fd: int
    node: Node
    listing: list[tuple[int, int, bytes]] = field(default_factory=list)
    """Entries of a directory: inode, type, name."""


class StorageServer:
    def __init__(self, folder: Path, channel: FuseChannel, weather: Weather) -> None:
        self._channel = channel
        self._weather = weather
        root = os.open(folder, os.O_PATH)
        self._nodes = {ROOT_NODE: Node(root, _key_of(os.fstat(root)), lookups=1)}
        self._by_key = {node.key: number for number, node in self._nodes.items()}
        self._next_node = ROOT_NODE + 1
        self._handles: dict[int, Handle] = {}
        self._next_handle = 1
        self._answers: dict[int, Callable[[Node, bytes], bytes]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._get_attributes,
            Opcode.SETATTR: self._set_attributes,
            Opcode.READLINK: lambda node, body: os.fsencode(os.readlink("", dir_fd=node.fd)),
            Opcode.SYMLINK: self._make_symlink,
            Opcode.MKNOD: self._make_special,
            Opcode.MKDIR: self._make_directory,
            Opcode.UNLINK: lambda node, body: self._remove(node, body, os.unlink),
            Opcode.RMDIR: lambda node, body: self._remove(node, body, os.rmdir),
            Opcode.RENAME: self._rename,
            Opcode.LINK: self._link,
            Opcode.OPEN: self._open,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.STATFS: self._describe_space,
            Opcode.RELEASE: self._release,
            Opcode.RELEASEDIR: self._release,
            # Storage that outlives its clients keeps what it was sent.
            Opcode.FSYNC: lambda node, body: b"",
            Opcode.FSYNCDIR: lambda node, body: b"",
            Opcode.FLUSH: lambda node, body: b"",
            Opcode.DESTROY: lambda node, body: b"",
            Opcode.OPENDIR: self._open_directory,
            Opcode.READDIR: self._read_directory,
            Opcode.CREATE: self._create,
            Opcode.SETLK: self._lock,
            Opcode.SETLKW: self._lock,
        }

    def answer(self, request: Request) -> None:
        if request.opcode in WITHOUT_REPLY:
            self._forget(request)
            return
        error = self._weather.strike() if request.opcode in MAY_FAIL else 0
        if error:
            self._fail(request, error)
        else:
            error, body = self._carry_out(request)
            self._channel.reply(request.unique, b"" if error else body, error)

    def _fail(self, request: Request, error: int) -> None:
        """Answer with an error; the request is carried out or not, or a write by half."""
        fate = self._weather.choose_fate(request.opcode)
        if fate == "half":
            handle, offset, size_bytes, flags = _READ.unpack_from(request.body)
            half = _READ.pack(handle, offset, size_bytes // 2, flags)
            request = request._replace(body=half + request.body[_READ.size :])
        if fate != "not":
            self._carry_out(request)
        name = f"{Opcode(request.opcode).name} {errorcode[error]}"
        self._weather.counts[name if fate == "not" else f"{name}, {fate} carried out"] += 1
        self._channel.reply(request.unique, b"", error)

    def _carry_out(self, request: Request) -> tuple[int, bytes]:
        if (handler := self._answers.get(request.opcode)) is None:
            return ENOSYS, b""
        try:
            return 0, handler(self._nodes[request.node], request.body)
        except OSError as error:
            return error.errno or EIO, b""

    # Names -----------------------------------------------------------------------------------

    def _lookup(self, parent: Node, body: bytes) -> bytes:
        try:
            return self._enter(parent, body.rstrip(b"\0"))
        except FileNotFoundError:
            return pack_no_entry(_cached_s(os.fstat(parent.fd)))

    def _enter(self, parent: Node, name: bytes) -> bytes:
        """Build the entry of a name, which the kernel has from now on."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=parent.fd)
        stat = os.fstat(fd)
        key = _key_of(stat)
        number = self._by_key.get(key)
        if number is None:
            number, self._next_node = self._next_node, self._next_node + 1
            self._nodes[number], self._by_key[key] = Node(fd, key), number
        else:
            os.close(fd)
        self._nodes[number].lookups += 1
        return pack_entry(number, stat, _cached_s(stat))

    def _forget(self, request: Request) -> None:
        if request.opcode == Opcode.FORGET:
            forgotten = [(request.node, struct.unpack("<Q", request.body)[0])]
        elif request.opcode == Opcode.BATCH_FORGET:
            forgotten = [*struct.iter_unpack("<QQ", request.body[8:])]
        else:
            return
        for number, lookups in forgotten:
            node = self._nodes[number]
            node.lookups -= lookups
            if node.lookups <= 0 and number != ROOT_NODE:
                os.close(node.fd)
                del self._nodes[number], self._by_key[node.key]

    def _note_removal(self, parent: Node, name: bytes) -> None:
        """Keep open descriptors of a file that this node is about to remove or to replace."""
        try:
            key = _key_of(os.stat(name, dir_fd=parent.fd, follow_symlinks=False))
        except FileNotFoundError:
            return
        if (number := self._by_key.get(key)) is not None:
            self._nodes[number].removed_here = True

    def _remove(self, parent: Node, body: bytes, remove: Callable[..., None]) -> bytes:
        name = body.rstrip(b"\0")
        self._note_removal(parent, name)
        remove(name, dir_fd=parent.fd)
        return b""

    def _rename(self, parent: Node, body: bytes) -> bytes:
        target = self._nodes[struct.unpack_from("<Q", body)[0]]
        old, new = body[8:].rstrip(b"\0").split(b"\0")
        self._note_removal(target, new)
        os.rename(old, new, src_dir_fd=parent.fd, dst_dir_fd=target.fd)
        return b""

    def _link(self, parent: Node, body: bytes) -> bytes:
        linked, name = self._nodes[struct.unpack_from("<Q", body)[0]], body[8:].rstrip(b"\0")
        os.link(_path_of(linked), name, dst_dir_fd=parent.fd)
        return self._enter(parent, name)

    def _make_directory(self, parent: Node, body: bytes) -> bytes:
        (mode,), name = struct.unpack_from("<I", body), body[8:].rstrip(b"\0")
        os.mkdir(name, mode, dir_fd=parent.fd)
        return self._enter(parent, name)

    def _make_special(self, parent: Node, body: bytes) -> bytes:
        (mode, device), name = struct.unpack_from("<II", body), body[16:].rstrip(b"\0")
        os.mknod(name, mode, device, dir_fd=parent.fd)
        return self._enter(parent, name)

    def _make_symlink(self, parent: Node, body: bytes) -> bytes:
        name, target = body.rstrip(b"\0").split(b"\0")
        os.symlink(target, name, dir_fd=parent.fd)
        return self._enter(parent, name)

    # Attributes ------------------------------------------------------------------------------

    def _get_attributes(self, node: Node, body: bytes) -> bytes:
        stat = self._require_present(node)
        return pack_attributes_reply(stat, _cached_s(stat))

    def _set_attributes(self, node: Node, body: bytes) -> bytes:
        self._require_present(node)
        fields = _SETATTR.unpack_from(body)
        what, handle, size_bytes = fields[0], fields[2], fields[3]
        path = _path_of(node)
        if what & _MODE:
            Path(path).chmod(kinds.S_IMODE(fields[11]))
        if what & (_UID | _GID):
            os.chown(path, fields[13] if what & _UID else -1, fields[14] if what & _GID else -1)
        if what & _SIZE_PATTERN:
            os.truncate(self._handles[handle].fd if what & _HANDLE else path, size_bytes)
        if what & (_ATIME | _MTIME):
            now, stat = time.time_ns(), os.fstat(node.fd)
            given = (fields[5] * 10**9 + fields[8], fields[6] * 10**9 + fields[9])
            times = [stat.st_atime_ns, stat.st_mtime_ns]
            for index, (flag, is_now) in enumerate(((_ATIME, _ATIME_NOW), (_MTIME, _MTIME_NOW))):
                if what & flag:
                    times[index] = now if what & is_now else given[index]
            os.utime(path, ns=(times[0], times[1]))
        return self._get_attributes(node, b"")

    def _require_present(self, node: Node) -> os.stat_result:
        """Read a node's attributes; fail with ESTALE if another node has removed it."""
        stat = os.fstat(node.fd)
        if stat.st_nlink == 0 and not node.removed_here:
            self._weather.counts["removed by another node: ESTALE"] += 1
            raise OSError(ESTALE, "removed by another node")
        return stat

    def _describe_space(self, node: Node, body: bytes) -> bytes:
        space = os.fstatvfs(node.fd)
        return STATFS_OUT.pack(
            *(space.f_blocks, space.f_bfree, space.f_bavail, space.f_files, space.f_ffree),
            *(space.f_bsize, space.f_namemax, space.f_frsize, 0),
        )

    # Open files ------------------------------------------------------------------------------

    def _open(self, node: Node, body: bytes) -> bytes:
        self._require_present(node)
        (flags,) = struct.unpack_from("<I", body)
        number = self._number_of(node)
        opened = self._keep_open(node, os.open(_path_of(node), flags & ~_OWN_FLAGS))
        # Close-to-open: what it wrote and closed elsewhere is seen by who opens it here.
        self._channel.forget_attributes(number)
        return opened

    def _create(self, parent: Node, body: bytes) -> bytes:
        (flags, mode), name = struct.unpack_from("<II", body), body[16:].rstrip(b"\0")
        fd = os.open(name, flags & ~_OWN_FLAGS | os.O_CREAT, mode, dir_fd=parent.fd)
        entry = self._enter(parent, name)
        return entry + self._keep_open(self._nodes[self._by_key[_key_of(os.fstat(fd))]], fd)

    def _keep_open(self, node: Node, fd: int, flags: int = 0) -> bytes:
        number, self._next_handle = self._next_handle, self._next_handle + 1
        self._handles[number] = Handle(fd, node)
        return OPEN_OUT.pack(number, flags, 0)

    def _read(self, node: Node, body: bytes) -> bytes:
        self._require_present(node)
        handle, offset, size_bytes, _ = _READ.unpack_from(body)
        return os.pread(self._handles[handle].fd, size_bytes, offset)

    def _write(self, node: Node, body: bytes) -> bytes:
        self._require_present(node)
        handle, offset, size_bytes, _ = _READ.unpack_from(body)
        data = body[_READ.size : _READ.size + size_bytes]
        return struct.pack("<II", os.pwrite(self._handles[handle].fd, data, offset), 0)

    def _lock(self, node: Node, body: bytes) -> bytes:
        """Lock by flock, which NFS asks the server for. No request here waits for a lock."""
        handle, _, _, _, kind, _, lock_flags, _ = _LOCK.unpack_from(body)
        if not lock_flags & _IS_FLOCK:
            raise OSError(ENOSYS, "no record locks")
        operation = {fcntl.F_RDLCK: fcntl.LOCK_SH, fcntl.F_WRLCK: fcntl.LOCK_EX}
        wanted = operation.get(kind, fcntl.LOCK_UN)
        try:
            fcntl.flock(self._handles[handle].fd, wanted | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(EAGAIN, "locked") from None
        return b""

    def _release(self, node: Node, body: bytes) -> bytes:
        os.close(self._handles.pop(struct.unpack_from("<Q", body)[0]).fd)
        return b""

    # Directories -----------------------------------------------------------------------------

    def _open_directory(self, node: Node, body: bytes) -> bytes:
        self._require_present(node)
        fd = os.open(_path_of(node), os.O_RDONLY | os.O_DIRECTORY)
        return self._keep_open(node, fd, KEEP_CACHE | CACHE_DIR)

    def _read_directory(self, node: Node, body: bytes) -> bytes:
        number, offset, size_bytes, _ = _READ.unpack_from(body)
        handle = self._handles[number]
        if offset == 0:
            with os.scandir(handle.fd) as entries:
                handle.listing = [
                    (entry.inode(), _kind_of(entry), os.fsencode(entry.name)) for entry in entries
                ]
        listed = b""
        for position, entry in enumerate(handle.listing[offset:], start=offset + 1):
            packed = pack_directory_entry(entry[0], position, entry[1], entry[2])
            if len(listed) + len(packed) > size_bytes:
                break
            listed += packed
        return listed

    def _number_of(self, node: Node) -> int:
        return self._by_key[node.key]


def _key_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _path_of(node: Node) -> str:
    return f"/proc/self/fd/{node.fd}"


def _kind_of(entry: os.DirEntry[str]) -> int:
    if entry.is_symlink():
        return kinds.S_IFLNK >> 12
    return (kinds.S_IFDIR if entry.is_dir() else kinds.S_IFREG) >> 12


def _cached_s(stat: os.stat_result) -> float:
    """Compute the time for which the kernel caches attributes: longer for older changes."""
    least, most = DIRECTORY_CACHED_S if kinds.S_ISDIR(stat.st_mode) else FILE_CACHED_S
    return min(most, max(least, time.time() - stat.st_mtime))


def obey(line: str, weather: Weather) -> None:
    """Carry out one order.

    `{"failure_rate": 0.001}` from now on, `{"hang_s": 30}` once, `{"report": true}`: what went
    wrong so far is printed as a line of JSON.
    """
    order = json.loads(line)
    weather.failure_rate = order.get("failure_rate", weather.failure_rate)
    if seconds := order.get("hang_s"):
        weather.counts["hung"] += 1
        weather.hangs_until = time.monotonic() + seconds
    if order.get("report"):
        print(json.dumps(weather.counts), flush=True)


def take_orders(weather: Weather, channel: FuseChannel) -> None:
    for line in sys.stdin:
        obey(line, weather)
    channel.unmount()
    os._exit(0)


def main(folder: str, mountpoint: str, seed: str) -> None:
    """Serve until standard input ends or the mount is gone."""
    os.umask(0)
    weather = Weather(chance=random.Random(int(seed)))
    channel = FuseChannel(Path(mountpoint))
    server = StorageServer(Path(folder), channel, weather)
    threading.Thread(target=take_orders, args=(weather, channel), daemon=True).start()
    print("mounted", flush=True)
    for request in channel.requests():
        if (pause_s := weather.hangs_until - time.monotonic()) > 0:
            time.sleep(pause_s)
        server.answer(request)


if __name__ == "__main__":
    main(*sys.argv[1:])

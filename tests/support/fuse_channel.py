"""The kernel's FUSE protocol, for a file system that this process serves.

Structures of `linux/fuse.h`, version 7.31.
"""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from errno import ENODEV, ENOENT
from pathlib import Path
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)

MAX_WRITE_BYTES = 1 << 17
ROOT_NODE = 1
_BUFFER_BYTES = MAX_WRITE_BYTES + 8192
_PROTOCOL_VERSION = (7, 31)
_MS_NOSUID, _MS_NODEV, _MNT_DETACH = 2, 4, 2


class Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    SETLK = 32
    SETLKW = 33
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


WITHOUT_REPLY = (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT)

FLOCK_LOCKS, AUTO_INVAL_DATA, BIG_WRITES = 1 << 10, 1 << 12, 1 << 5
"""Flags of INIT: flock is asked of us; changed attributes make the kernel drop data."""
KEEP_CACHE, CACHE_DIR = 1 << 1, 1 << 3
"""Flags of OPEN and OPENDIR."""
_INVAL_INODE = 2

_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<QQQQII")
_ATTR_OUT = struct.Struct("<QII")
_INIT_IN = struct.Struct("<IIII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
_NOTIFY_INVAL = struct.Struct("<Qqq")
OPEN_OUT = struct.Struct("<QII")
STATFS_OUT = struct.Struct("<5Q4I24x")
_DIRENT = struct.Struct("<QQII")


class Request(NamedTuple):
    opcode: int
    unique: int
    node: int
    body: bytes


class FuseChannel:
    """A mounted file system, on the side of its server."""

    def __init__(self, mountpoint: Path) -> None:
        """Mount. Needs root."""
        self._mountpoint = mountpoint
        self.fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = (
            f"fd={self.fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        )
        arguments = (b"network", bytes(mountpoint), b"fuse", _MS_NOSUID | _MS_NODEV)
        if _libc.mount(*arguments, options.encode()):
            raise OSError(ctypes.get_errno(), f"cannot mount FUSE at {mountpoint}")

    def requests(self) -> Iterator[Request]:
        """Yield the waiting requests, one at a time, until the mount is gone."""
        while True:
            try:
                data = os.read(self.fd, _BUFFER_BYTES)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == ENOENT:  # it was interrupted before we could read it
                    continue
                if error.errno == ENODEV:
                    return
                raise
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(data)
            if opcode == Opcode.INIT:
                self.reply(unique, _accept_init(data[_IN_HEADER.size :]))
                continue
            yield Request(opcode, unique, node, data[_IN_HEADER.size :])

    def reply(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        with suppress(FileNotFoundError):
            os.writev(
                self.fd, [_OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique), body]
            )

    def forget_attributes(self, node: int) -> None:
        """Have the kernel ask for a file's attributes when it needs them next."""
        body = _NOTIFY_INVAL.pack(node, -1, 0)
        with suppress(FileNotFoundError):
            size = _OUT_HEADER.size + len(body)
            os.writev(self.fd, [_OUT_HEADER.pack(size, _INVAL_INODE, 0), body])

    def unmount(self) -> None:
        _libc.umount2(bytes(self._mountpoint), _MNT_DETACH)


def pack_attributes(stat: os.stat_result) -> bytes:
    times = (stat.st_atime_ns, stat.st_mtime_ns, stat.st_ctime_ns)
    return _ATTR.pack(
        *(stat.st_ino, stat.st_size, stat.st_blocks),
        *(ns // 10**9 for ns in times),
        *(ns % 10**9 for ns in times),
        *(stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid),
        *(stat.st_rdev, stat.st_blksize, 0),
    )


def pack_entry(node: int, stat: os.stat_result, cached_s: float) -> bytes:
    whole_s, rest_ns = _split_seconds(cached_s)
    return _ENTRY.pack(node, 0, whole_s, whole_s, rest_ns, rest_ns) + pack_attributes(stat)


def pack_no_entry(cached_s: float) -> bytes:
    whole_s, rest_ns = _split_seconds(cached_s)
    return _ENTRY.pack(0, 0, whole_s, 0, rest_ns, 0) + bytes(_ATTR.size)


def pack_attributes_reply(stat: os.stat_result, cached_s: float) -> bytes:
    whole_s, rest_ns = _split_seconds(cached_s)
    return _ATTR_OUT.pack(whole_s, rest_ns, 0) + pack_attributes(stat)


def pack_directory_entry(inode: int, offset: int, kind: int, name: bytes) -> bytes:
    padding = -len(name) % 8
    return _DIRENT.pack(inode, offset, len(name), kind) + name + bytes(padding)


def _split_seconds(seconds: float) -> tuple[int, int]:
    return int(seconds), int(seconds % 1 * 10**9)


def _accept_init(body: bytes) -> bytes:
    _, _, readahead_bytes, offered = _INIT_IN.unpack_from(body)
    flags = offered & (FLOCK_LOCKS | AUTO_INVAL_DATA | BIG_WRITES)
    return _INIT_OUT.pack(
        *(*_PROTOCOL_VERSION, readahead_bytes, flags), *(16, 12, MAX_WRITE_BYTES, 1), 0, 0, 0, 0
    )

"""Measurement of the memory of a sandbox's processes without control groups.

Resident pages are not enough: shared memory that a process has released, and unread data in
sockets, count as resident in no process.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from areal_hpc.jobs.processes.process_ties import read_resident_bytes

SOCKET_BYTES = 208 << 10
"""Maximum unread data in one socket, by the kernel's default (net.core.wmem_default)."""
_PAGE_BYTES = 4096
_SHARED_MEMORY_NAME = b"/dev/zero (deleted)"


def measure_memory_bytes(pids: Iterable[int], limit_bytes: int) -> int:
    """Return at least what processes hold together; read their maps only near the limit."""
    pid_list = list(pids)
    resident = sum(map(read_resident_bytes, pid_list))
    sockets = max(map(_read_own_socket_bytes, pid_list), default=0)
    if sum(map(_read_mapped_bytes, pid_list)) <= limit_bytes:
        return resident + sockets
    return resident + sockets + _sum_shared_bytes(pid_list)


def _sum_shared_bytes(pids: Iterable[int]) -> int:
    bytes_by_inode = dict[bytes, int]()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        except PermissionError:  # its maps are hidden: all that it has mapped may be shared
            bytes_by_inode[b"%d" % pid] = _read_mapped_bytes(pid)
            continue
        except OSError:  # it has ended
            continue
        for line in lines:
            if line.endswith(_SHARED_MEMORY_NAME):
                address_range, _, _, _, inode, *_ = line.split()
                begin, end = (int(address, 16) for address in address_range.split(b"-"))
                bytes_by_inode[inode] = bytes_by_inode.get(inode, 0) + end - begin
    return sum(bytes_by_inode.values())


def _read_mapped_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[0]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _read_own_socket_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # its namespaces are hidden, or it has ended
        if Path(f"/proc/{pid}/ns/net").samefile("/proc/self/ns/net"):
            return 0
    try:
        if Path(f"/proc/{pid}/net/dev").read_bytes().count(b":") != 1:
            return 0
        sockets = Path(f"/proc/{pid}/net/sockstat").read_bytes().split(maxsplit=3)[2]
        return int(sockets) * SOCKET_BYTES
    except (OSError, IndexError, ValueError):
        return 0

"""Memory of a sandbox's processes, also what their resident pages do not show.

Where no control group counts: pages that a process shares with others and has let go of, or that
wait in sockets, are nobody's.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from areal_hpc.jobs.processes.process_ties import read_resident_bytes

SOCKET_BYTES = 208 << 10
"""What waits unread in one at most, by the kernel's default (net.core.wmem_default)."""
_PAGE_BYTES = 4096
_SHARED_MEMORY_NAME = b"/dev/zero (deleted)"


def measure_memory_bytes(pids: Iterable[int], limit_bytes: int) -> int:
    """At least what processes hold together; looked at closely only where it may be too much."""
    known = list(pids)
    resident = sum(map(read_resident_bytes, known))
    sockets = max(map(_read_own_socket_bytes, known), default=0)
    if sum(map(_read_mapped_bytes, known)) <= limit_bytes:
        return resident + sockets
    return resident + sockets + _sum_shared_bytes(known)


def _sum_shared_bytes(pids: Iterable[int]) -> int:
    bytes_by_inode = dict[bytes, int]()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        except PermissionError:  # it hides: all that it has mapped may be shared
            bytes_by_inode[b"%d" % pid] = _read_mapped_bytes(pid)
            continue
        except OSError:  # it has ended
            continue
        for line in lines:
            if line.endswith(_SHARED_MEMORY_NAME):
                place, _, _, _, inode, *_ = line.split()
                begin, end = (int(one, 16) for one in place.split(b"-"))
                bytes_by_inode[inode] = bytes_by_inode.get(inode, 0) + end - begin
    return sum(bytes_by_inode.values())


def _read_mapped_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_bytes().split()[0]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def _read_own_socket_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):  # it hides, or has ended
        if Path(f"/proc/{pid}/ns/net").samefile("/proc/self/ns/net"):
            return 0
    try:
        if Path(f"/proc/{pid}/net/dev").read_bytes().count(b":") != 1:
            return 0
        used = Path(f"/proc/{pid}/net/sockstat").read_bytes().split(maxsplit=3)[2]
        return int(used) * SOCKET_BYTES
    except (OSError, IndexError, ValueError):
        return 0

"""The process that writes a rank's part of a checkpoint to disk: `python -m` this module.

It shares one piece of memory with its rank, told by descriptor on the command line. Requests
come in on standard input and replies go out on standard output, one JSON object a line. It
lives as long as its rank, hears none of the signals meant for that one, and imports no torch.
"""

import mmap
import os
import shutil
import signal
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from areal_hpc.jobs.processes.die_with_parent import die_with_parent
from areal_hpc.jobs.processes.signals import STOP_SIGNALS
from areal_hpc.rundir.atomic import fsync_path
from areal_hpc.rundir.checkpoint_index import DIGEST_BLOCK_BYTES
from areal_hpc.wire.fault_points import fault_point

NICENESS = 5
"""Training comes first on a node whose cores are all taken."""


class WriteRequest(msgspec.Struct, frozen=True, tag=True):
    """Put the first `size_bytes` of the shared memory and digests into a new file, durably."""

    path: str
    size_bytes: int
    neighbors: list[str] = []
    """Files in the same directory, already written, that are to be durable as well."""


class RemoveRequest(msgspec.Struct, frozen=True, tag=True):
    """Delete a directory that nobody looks at any more. Has no reply."""

    path: str


class WriteReply(msgspec.Struct, frozen=True):
    seconds: float
    error: str = ""
    """Empty when everything is on disk."""


def main() -> None:
    """Serve one rank until it closes the pipe, or dies."""
    memory, parent = int(sys.argv[1]), int(sys.argv[2])
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        return
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        match msgspec.json.decode(line, type=WriteRequest | RemoveRequest):
            case RemoveRequest(path):
                shutil.rmtree(path, ignore_errors=True)  # the next start cleans up the rest
            case WriteRequest() as request:
                os.write(1, msgspec.json.encode(_handle_write_request(request, memory)) + b"\n")


def _handle_write_request(request: WriteRequest, memory: int) -> WriteReply:
    began = time.perf_counter()
    try:
        path = Path(request.path)
        fault_point("checkpoint.before_write")
        write_rank_file(memory, path, request.size_bytes)
        for name in request.neighbors:
            fsync_path(path.parent / name)
        fsync_path(path.parent)
    except OSError as error:
        return WriteReply(time.perf_counter() - began, str(error))
    return WriteReply(time.perf_counter() - began)


def write_rank_file(memory: int, path: Path, size_bytes: int) -> None:
    """Write what is in memory, and behind it the digests of its blocks. Forced to disk.

    The bytes go within the kernel: this process holds none of its own.
    """
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        digests = []
        for start, block in _iterate_mapped_blocks(memory, size_bytes):
            done = 0
            while done < len(block):
                done += os.sendfile(target, memory, start + done, len(block) - done)
            digests.append(zlib.crc32(block))
        fault_point("checkpoint.before_digests")
        rest = memoryview(struct.pack(f"<{len(digests)}I", *digests))
        while rest:
            rest = rest[os.write(target, rest) :]
        os.fsync(target)
    finally:
        os.close(target)


def _iterate_mapped_blocks(memory: int, size_bytes: int) -> Iterator[tuple[int, memoryview]]:
    """Each block of the shared memory, and where it begins."""
    if not size_bytes:  # which could not be mapped
        return
    with mmap.mmap(memory, size_bytes, prot=mmap.PROT_READ) as shared, memoryview(shared) as view:
        for start in range(0, size_bytes, DIGEST_BLOCK_BYTES):
            with view[start : start + DIGEST_BLOCK_BYTES] as block:
                yield start, block


if __name__ == "__main__":
    main()

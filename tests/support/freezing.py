"""Freezing of storage and of processes, which a run sees as a hung server or node."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.commands import run_program, said_by
from tests.support.process_commands import find_processes

SIZE_BYTES = 4 << 30


class FreezableDisk:
    """An ext4 file system in a sparse file. Needs root."""

    def __init__(self, root: Path) -> None:
        self.root = root / "disk"
        image = root / "disk.img"
        self.root.mkdir(parents=True)
        with image.open("wb") as stream:
            stream.truncate(SIZE_BYTES)
        said_by(run_program("mkfs.ext4", "-q", image))
        said_by(run_program("mount", "-o", "loop", image, self.root))

    def freeze(self, seconds: float) -> None:
        """Make its writers wait for so long."""
        said_by(run_program("fsfreeze", "--freeze", self.root))
        try:
            time.sleep(seconds)
        finally:
            said_by(run_program("fsfreeze", "--unfreeze", self.root))

    def unmount(self) -> None:
        said_by(run_program("umount", "--lazy", self.root))


@contextmanager
def freezable_disk(root: Path) -> Iterator[FreezableDisk]:
    disk = FreezableDisk(root)
    try:
        yield disk
    finally:
        disk.unmount()


def freeze_job(job_dir: Path, seconds: float) -> int:
    """Stop every process of a job for so long, as if its node had; how many they were."""
    supervisor = find_processes("submitit", job_dir)[0]
    members = [supervisor, *supervisor.children(recursive=True)]
    for process in members:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        time.sleep(seconds)
    finally:
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    return len(members)

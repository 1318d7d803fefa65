"""Nodes that share a folder by network storage: each sees it at the same path, in its own way.

Needs root: FUSE mounts, and mount namespaces for all nodes but this one.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.environments import CHECKOUT

APART = ("unshare", "--mount", "--propagation", "private", "--")
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class StorageNode:
    """A node's client of the storage."""

    process: subprocess.Popen[str]

    def order(self, **order: float) -> None:
        """Have it fail or hang: see `network_storage.obey`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def counts(self) -> Counter[str]:
        """What went wrong here so far."""
        self.order(report=True)
        assert self.process.stdout is not None
        return Counter(json.loads(self.process.stdout.readline()))

    def write_python(self, path: Path, interpreter: Path) -> Path:
        """A program that is an interpreter on this node."""
        enter = f"nsenter --mount=/proc/{self.process.pid}/ns/mnt"
        there = 'sh -c \'cd "$1" && shift && exec "$@"\' sh "$PWD"'
        return write_program(path, f'exec {enter} {there} {interpreter} "$@"')

    def close(self) -> None:
        """Unmount; what still uses the storage finds it gone."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(scaled(STOP_TIMEOUT_S))
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def storage_nodes(
    folder: Path, mountpoint: Path, names: tuple[str, ...]
) -> Iterator[dict[str, StorageNode]]:
    """Clients by name; the last is this machine's own, the others are in namespaces apart."""
    folder.mkdir(parents=True)
    mountpoint.mkdir(parents=True)
    with ExitStack() as stack:
        nodes = {}
        for seed, name in enumerate(names):
            nodes[name] = _mount(folder, mountpoint, seed, apart=name != names[-1])
            stack.callback(nodes[name].close)
        yield nodes


def _mount(folder: Path, mountpoint: Path, seed: int, *, apart: bool) -> StorageNode:
    process = subprocess.Popen(
        [
            *(APART if apart else ()),
            *(sys.executable, "-m", "tests.support.network_storage"),
            *map(str, (folder, mountpoint, seed)),
        ],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mounted\n"
    return StorageNode(process)

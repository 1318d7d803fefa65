"""Seals the same rows in `<root>/<n>/`, killed (kill -9) before the n-th line of code first runs.

Started by `test_kill.py`; ends with the first seal that runs to its end.
"""

import itertools
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from areal_hpc.rundir import atomic
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards import disk_io, index, writer
from tests.support.sample_trajectories import ticket

if TYPE_CHECKING:
    from _typeshed import TraceFunction

WATCHED = {module.__file__ for module in (writer, index, atomic, disk_io)}
"""Everything that touches the disk."""


def seal_and_die(paths: RunPaths, line_to_die_at: int) -> None:
    lines_seen: set[tuple[str, int]] = set()

    def watch(frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        if frame.f_code.co_filename not in WATCHED:
            return None
        lines_seen.add((frame.f_code.co_name, frame.f_lineno))
        if len(lines_seen) > line_to_die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return watch

    sys.settrace(watch)
    writer.seal_shard(ticket(2), paths.shards_dir, paths.index_dir, "cell-0")
    sys.settrace(None)


def main() -> None:
    root = Path(sys.argv[1])
    begun = RunPaths(root / "begun")
    writer.seal_shard(ticket(1), begun.shards_dir, begun.index_dir, "cell-0")
    for line_to_die_at in itertools.count():
        paths = RunPaths(root / str(line_to_die_at))
        shutil.copytree(begun.root, paths.root)
        child = os.fork()
        if child == 0:
            seal_and_die(paths, line_to_die_at)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return


if __name__ == "__main__":
    main()

"""kill -9 at any moment loses no acknowledged record, and readers see complete shards only."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import pytest

from areal_hpc.rundir import files
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards import index, writer
from areal_hpc.shards.index import locate_tickets, read_index
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import repair_index, verify_run
from areal_hpc.wire.ledger import TicketRef
from tests.support.sample_trajectories import fields, seal_in, ticket

if TYPE_CHECKING:
    from _typeshed import TraceFunction

PROCESSES = multiprocessing.get_context("forkserver")
WATCHED = {module.__file__ for module in (writer, index, files)}
"""Modules that touch the disk when a shard is sealed."""


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
    seal_in(paths, ticket(2))
    os._exit(0)


def seal_and_die_at_every_line(root: Path) -> None:
    """Seal in `<root>/<n>/`, killed before the n-th line of code first runs, until complete."""
    begun = RunPaths(root / "begun")
    seal_in(begun, ticket(1))
    for line_to_die_at in itertools.count():
        paths = RunPaths(root / str(line_to_die_at))
        shutil.copytree(begun.root, paths.root)
        child = os.fork()
        if child == 0:
            seal_and_die(paths, line_to_die_at)
        if os.waitpid(child, 0)[1] == 0:
            return


def append_forever(path: Path, acknowledged: Connection) -> None:
    """Append numbered records with rotations, and acknowledge each once `append` has returned."""
    journal = JournalWriter(path, sync_interval_s=0.001)
    for number in itertools.count():
        journal.append(number, b"%d" % number * (number % 4000))
        acknowledged.send(number)
        if number % 25 == 24:
            journal.compact(lambda record: True)


def stage(paths: RunPaths) -> str:
    names = [path.name for path in paths.shards_dir.iterdir()]
    if TicketRef(2, 1) in locate_tickets(read_index(paths.shard_index_dir)):
        return "sealed"
    if "cell-0-000001.h5" in names:
        return "orphan"
    return "partial" if "cell-0-000001.h5.tmp" in names else "nothing"


def test_a_seal_killed_at_any_line_leaves_a_whole_shard_or_none(tmp_path: Path) -> None:
    sealing = PROCESSES.Process(target=seal_and_die_at_every_line, args=(tmp_path,))
    sealing.start()
    sealing.join()
    assert sealing.exitcode == 0
    stages: dict[str, RunPaths] = {}
    for path in tmp_path.iterdir():
        paths = RunPaths(path)
        before = stage(paths)
        stages[before] = paths
        assert_only_whole_shards_are_visible(paths)
        assert len(verify_run(paths).problems) == (before == "orphan")
        repair_index(paths, "cell-0")
        assert stage(paths) == {"partial": "nothing", "orphan": "sealed"}.get(before, before)
        assert verify_run(paths).problems == []
        assert not list(paths.shards_dir.glob("*.tmp"))

    assert set(stages) == {"nothing", "partial", "orphan", "sealed"}
    for paths in stages.values():
        seal_in(paths, ticket(3))
        assert verify_run(paths).problems == []


def assert_only_whole_shards_are_visible(paths: RunPaths) -> None:
    for path in paths.shards_dir.glob("*.h5"):
        rows = ShardReader(path).read_rows([0, 1])
        expected = ticket(2 if path.name == "cell-0-000001.h5" else 1)
        assert [fields(row) for row in rows] == [fields(row) for row in expected]


@pytest.mark.parametrize("trial", range(6))
def test_acknowledged_records_survive_their_writers_death(trial: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    to_acknowledge = random.Random(trial).randrange(1, 400)
    receiver, sender = PROCESSES.Pipe(duplex=False)
    appending = PROCESSES.Process(target=append_forever, args=(path, sender))
    appending.start()
    sender.close()
    acknowledged = [receiver.recv() for _ in range(to_acknowledge)]
    appending.kill()
    with suppress(EOFError):
        while True:
            acknowledged.append(receiver.recv())
    appending.join()

    records = list(read_journal(path))
    assert len(acknowledged) <= len(records) <= len(acknowledged) + 1
    assert records == [
        JournalRecord(number, b"%d" % number * (number % 4000)) for number in range(len(records))
    ]
    JournalWriter(path, sync_interval_s=1).close()
    assert list(read_journal(path)) == records

"""kill -9 at any moment loses nothing acknowledged and shows nobody half a shard."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import locate_tickets, read_index
from areal_hpc.shards.journal import JournalRecord, JournalWriter, read_journal
from areal_hpc.shards.reader import ShardReader
from areal_hpc.shards.verify import repair_index, verify_run
from areal_hpc.shards.writer import seal_shard
from tests.support.environments import CHECKOUT
from tests.support.sample_trajectories import fields, ticket


def module_command(name: str, path: Path) -> list[str]:
    return [sys.executable, "-m", f"tests.integration.shards.{name}", str(path)]


def stage(paths: RunPaths) -> str:
    """How far the second seal came."""
    names = [path.name for path in paths.shards_dir.iterdir()]
    if (2, 1) in locate_tickets(read_index(paths.index_dir)):
        return "sealed"
    if "cell-0-000001.h5" in names:
        return "orphan"
    return "partial" if "cell-0-000001.h5.tmp" in names else "nothing"


def test_a_seal_killed_at_any_line_leaves_a_whole_shard_or_none_and_can_be_repaired(
    tmp_path: Path,
) -> None:
    subprocess.run(module_command("die_at_every_line", tmp_path), cwd=CHECKOUT, check=True)
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
        seal_shard(ticket(3), paths.shards_dir, paths.index_dir, "cell-0")
        assert verify_run(paths).problems == []


def assert_only_whole_shards_are_visible(paths: RunPaths) -> None:
    for path in paths.shards_dir.glob("*.h5"):
        rows = ShardReader(path).read_rows([0, 1])
        expected = ticket(2 if path.name == "cell-0-000001.h5" else 1)
        assert [fields(row) for row in rows] == [fields(row) for row in expected]


@pytest.mark.parametrize("trial", range(6))
def test_every_acknowledged_record_survives_the_death_of_its_writer(
    trial: int, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    to_acknowledge = random.Random(trial).randrange(1, 400)
    with subprocess.Popen(
        module_command("append_forever", path), cwd=CHECKOUT, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        for _ in range(to_acknowledge):
            child.stdout.readline()
        child.kill()
        rest = child.stdout.read()
    acknowledged = to_acknowledge + rest.count(b"\n")

    records = list(read_journal(path))
    assert acknowledged <= len(records) <= acknowledged + 1
    assert records == [
        JournalRecord(number, b"%d" % number * (number % 4000)) for number in range(len(records))
    ]
    JournalWriter(path, sync_interval_s=1).close()
    assert list(read_journal(path)) == records

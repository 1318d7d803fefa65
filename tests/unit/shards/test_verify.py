from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import read_index
from areal_hpc.shards.verify import repair_index, verify_run
from tests.support.sample_trajectories import seal_in, ticket


@pytest.fixture
def paths(paths: RunPaths) -> RunPaths:
    """A run with two shards of one writer and one of another."""
    for ticket_id, writer in ((1, "cell-0"), (2, "cell-0"), (3, "cell-1")):
        seal_in(paths, ticket(ticket_id), writer)
    return paths


def complaints(paths: RunPaths) -> dict[str, str]:
    return {Path(problem.key).name: problem.message for problem in verify_run(paths).problems}


def drop_last_index_line(paths: RunPaths, writer: str) -> None:
    path = paths.shard_index_dir / f"{writer}.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_a_whole_run_has_no_problems_and_reports_its_progress(paths: RunPaths) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_run(paths, lambda done, total: seen.append((done, total)))
    assert (report.shards, report.rows, report.problems) == (3, 6, [])
    total_bytes = sum(shard.bytes for shard in read_index(paths.shard_index_dir))
    assert len(seen) == 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total_bytes, total_bytes)


def test_an_index_line_that_contradicts_its_shard_is_found(paths: RunPaths) -> None:
    path = paths.shard_index_dir / "cell-1.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"ticket_id":3', b'"ticket_id":4'))
    (message,) = complaints(paths).values()
    assert message.startswith("tickets: the index says")


def test_an_orphan_is_reported_and_repaired_once(paths: RunPaths) -> None:
    before = read_index(paths.shard_index_dir)
    drop_last_index_line(paths, "cell-0")
    assert list(complaints(paths)) == ["cell-0-000001.h5"]
    for _ in range(2):
        repair_index(paths)
        assert read_index(paths.shard_index_dir) == before
    assert verify_run(paths).problems == []


def test_repair_removes_halves_alone(paths: RunPaths, caplog: pytest.LogCaptureFixture) -> None:
    before = read_index(paths.shard_index_dir)
    partial = paths.shards_dir / "cell-0-000002.h5.tmp"
    partial.write_bytes(b"half")
    assert verify_run(paths).problems == []
    orphan = paths.shards_dir / "cell-0-000003.h5"
    orphan.write_bytes(b"no shard")
    repair_index(paths)
    assert not partial.exists()
    assert read_index(paths.shard_index_dir) == before
    assert str(orphan) in caplog.text
    assert orphan.exists()


def test_repair_for_one_writer_leaves_the_others_alone(paths: RunPaths) -> None:
    first, second, _ = read_index(paths.shard_index_dir)
    drop_last_index_line(paths, "cell-0")
    drop_last_index_line(paths, "cell-1")
    partial = paths.shards_dir / "cell-1-000001.h5.tmp"
    partial.touch()
    repair_index(paths, "cell-0")
    assert read_index(paths.shard_index_dir) == [first, second]
    assert partial.exists()

"""Where the time of a real run goes: all of it is known."""

from collections.abc import Iterator

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.telemetry.span_reader import ProcessSpans, read_spans
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.timing.timeline import EPISODES_LANE
from tests.support.small_run import LIGHT, SmallRun

MAX_ERROR_S = 0.05
MIN_COVERED = 0.95
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """Three steps with two trainer ranks and two cells."""
    folder = tmp_path_factory.mktemp("timeline")
    further = ("inference.cells=2", "trainer.parallel.dp=2", "trainer.total_steps=6")
    small = SmallRun(folder / "runs", *LIGHT, *further)
    small.finish()
    return small.paths


def compute_covered_share(process: ProcessSpans) -> float:
    """Of a process's time, the share in which it is known what it did."""
    covered, at = 0.0, process.begin
    for span in process.spans:
        covered += max(0.0, span.end - max(at, span.begin))
        at = max(at, span.end)
    return covered / (process.end - process.begin)


def test_spans_cover_each_processs_time(run: RunPaths) -> None:
    found = {one.name: one for one in read_spans(run)}
    assert found.keys() == {
        *("sft-sft-0", "sft-sft-1", "trainer-ledger-0", "trainer-trainer-0", "trainer-trainer-1"),
        *(f"cell-{cell}-{role}" for cell in (0, 1) for role in ("inference", "proxy", "driver")),
    }
    covered = {name: compute_covered_share(one) for name, one in found.items()}
    assert min(covered.values()) >= MIN_COVERED, covered
    assert sum(one.lost for one in found.values()) == 0


def test_replicas_are_updated_while_the_trainer_publishes(run: RunPaths) -> None:
    found = {one.name: one for one in read_spans(run)}
    published = [one for one in found["trainer-trainer-0"].spans if one.name == "publish"]
    updates = [one for one in found["cell-1-inference"].spans if one.name == "weight update"]
    assert len(updates) >= 6
    for update in updates:
        assert any(
            one.begin - MAX_ERROR_S <= update.begin and update.end <= one.end + MAX_ERROR_S
            for one in published
        )


def test_episodes_are_those_of_the_shards(run: RunPaths) -> None:
    found = {one.name: one for one in read_spans(run)}
    for cell in ("cell-0", "cell-1"):
        records = list(list_records(run, cell))
        assert records
        spans = {one[0]: one[1:] for one in list_episodes(found[f"{cell}-driver"])}
        for key, began_at, ended_at in records:
            begin, end = spans[key]
            assert begin - MAX_ERROR_S < began_at
            assert ended_at < end + MAX_ERROR_S


def list_records(run: RunPaths, cell: str) -> Iterator[tuple[tuple[int, int], float, float]]:
    """Ticket and episode of each trained row, with its times."""
    for sealed in read_index(run.shard_index_dir, cell):
        reader = ShardReader(run.shards_dir / sealed.file)
        rows = [row for ticket in sealed.tickets for row in ticket.rows]
        for row in reader.read_rows(rows):
            yield (row.ticket_id, row.episode), row.record.started_at, row.record.ended_at


def list_episodes(driver: ProcessSpans) -> Iterator[tuple[tuple[int, int], float, float]]:
    for one in driver.spans:
        if one.lane == EPISODES_LANE and one.facts["eval_step"] < 0:
            yield (one.facts["ticket_id"], one.facts["episode"]), one.begin, one.end

"""Search of the rows of a run, or of one shard, by what is known of each."""

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from areal_hpc.errors import RecipeError, ShardError
from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow


class StepByTicket:
    """Training steps of a run's tickets, read from its manifests when first asked for."""

    def __init__(self, paths: RunPaths | None) -> None:
        self._paths = paths

    def find_step(self, row: TrajectoryRow) -> int | None:
        """The step that trained a row, or whose weights were evaluated."""
        if row.eval_step >= 0:
            return row.eval_step
        if row.kind is not RowKind.TRAIN:
            return None
        return self._steps.get((row.ticket_id, row.attempt))

    @cached_property
    def _steps(self) -> dict[tuple[int, int], int]:
        steps: dict[tuple[int, int], int] = {}
        if self._paths is None:
            return steps
        for step in list_manifest_steps(self._paths):
            try:
                tickets = read_manifest(self._paths, step).tickets
            except ShardError:
                continue  # areal-hpc audit names it
            steps |= {(one.ref.ticket_id, one.ref.attempt): step for one in tickets}
        return steps


@dataclass(frozen=True, slots=True)
class FoundRow:
    reader: ShardReader
    row: int
    """In its shard."""
    number: int
    """Counted over all shards of the run."""
    steps: StepByTicket

    def read(self) -> TrajectoryRow:
        (row,) = self.reader.read_rows([self.row])
        return row


@dataclass(frozen=True, slots=True)
class RowQuery:
    """Which rows are wanted, and in which order."""

    where: str = ""
    """An expression of `row_filter`; all rows when empty."""
    ticket_id: int | None = None
    """All training rows and failed episodes of one ticket."""
    row_number: int | None = None
    """One row, counted over all shards."""
    sort_descending_by: str = ""
    """A field, largest first; as recorded when empty."""
    max_rows: int | None = None


def find_rows(path: Path, query: RowQuery) -> tuple[list[FoundRow], int]:
    """The rows of a shard or of a run's sealed shards that a query wants, and how many match.

    Without an order the last ones are taken, which are the newest of their cell.
    """
    if query.row_number is not None and (query.where or query.ticket_id is not None):
        raise RecipeError(
            "a row's number and a filter were given",
            key="--where" if query.where else "--ticket",
            hint="leave one of them out",
        )
    if path.is_file():
        run = RunPaths(path.parent.parent)
        readers, in_run = {path.name: ShardReader(path)}, path.parent == run.shards_dir
    else:
        run, in_run = RunPaths(path), True
        readers = {
            one.file: ShardReader(run.shards_dir / one.file)
            for one in read_index(run.shard_index_dir)
        }
    first_rows, total = {}, 0
    for file, reader in readers.items():
        first_rows[file] = total
        total += reader.num_rows
    places = [(file, row) for file, reader in readers.items() for row in range(reader.num_rows)]
    if query.row_number is not None:
        places = places[query.row_number :][:1] if query.row_number >= 0 else []
    elif query.where or query.sort_descending_by or query.ticket_id is not None:
        with closing(RowIndex(run, None)) as index:
            index.index_file(path) if path.is_file() else index.index_new_rows()
            matches = index.find_values(
                (),
                query.where,
                ticket_id=query.ticket_id,
                sort_descending_by=query.sort_descending_by,
            )
        places = [(file, row) for file, row in matches if file in readers]
    if not places and query.row_number is not None:
        hint = f"give a row from 0 to {total - 1}" if total else "wait for the first sealed shard"
        message = f"there is no row {query.row_number}: {path} holds {total} rows"
        raise RecipeError(message, key="row", hint=hint)
    if not places and query.ticket_id is not None:
        message = f"{path} holds no row of ticket {query.ticket_id}"
        hint = "areal-hpc shards ls RUN --json lists the tickets of every shard"
        raise RecipeError(message, key="--ticket", hint=hint)
    matching = len(places)
    if query.max_rows is not None:
        places = places[: query.max_rows] if query.sort_descending_by else places[-query.max_rows :]
    steps = StepByTicket(run if in_run else None)
    found = [FoundRow(readers[file], row, first_rows[file] + row, steps) for file, row in places]
    return found, matching

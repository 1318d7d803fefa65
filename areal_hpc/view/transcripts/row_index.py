"""SQLite index of a run's recorded rows, kept in the user's cache, for tables and filters.

All of its content comes from shards and manifests, so it may be removed at any time.
"""

import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import ClusterError, RecipeError, ShardError
from areal_hpc.rundir.manifests import list_manifest_steps, read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.transcripts.messages import extract_text, get_messages
from areal_hpc.view.transcripts.row_filter import (
    TYPE_BY_FIELD,
    SqlCondition,
    compile_filter,
    get_column_sql,
)
from areal_hpc.wire.trajectory import RowKind, RowRecord, TrajectoryRow
from areal_hpc.wire.weight_version import WeightVersion

TABLES_VERSION = 6
MAX_TEXT_CHARS = 100_000
MAX_EXCERPT_CHARS = 100
_LISTED_COLUMNS = (
    *("shard", "row", "eval_step", "oldest", "newest", "question", "reply"),
    *(field for field in TYPE_BY_FIELD if field not in ("note", "text")),
)
_COLUMNS = (*_LISTED_COLUMNS, "note", "named", "own_group")
_RECREATE_TABLES_SQL = f"""
BEGIN IMMEDIATE;
DROP TABLE IF EXISTS shards;
DROP TABLE IF EXISTS batches;
DROP TABLE IF EXISTS tickets;
DROP TABLE IF EXISTS rows;
DROP TABLE IF EXISTS texts;
CREATE TABLE shards (file TEXT PRIMARY KEY, digest TEXT);
CREATE TABLE batches (step INTEGER PRIMARY KEY);
CREATE TABLE tickets (ticket INTEGER, attempt INTEGER, step INTEGER, PRIMARY KEY (ticket, attempt));
CREATE TABLE rows (
  id INTEGER PRIMARY KEY, {", ".join(_COLUMNS)}, UNIQUE (shard, row)
);
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT);
CREATE INDEX rows_of_ticket ON rows (ticket, attempt);
CREATE INDEX rows_of_task ON rows (task, kind);
PRAGMA user_version = {TABLES_VERSION};
COMMIT;
"""
"""One transaction, as another process of the same user may open the index as well."""
_LISTED_SQL = ", ".join(_LISTED_COLUMNS)
_INSERT_ROW_SQL = f"INSERT INTO rows VALUES (:id, {', '.join(f':{name}' for name in _COLUMNS)})"

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RowPage:
    rows: list[JsonObject]
    matching: int
    total: int


class RowIndex:
    """Index of the rows of one run, kept in `folder`. Safe to use from several threads.

    Without a folder it is a temporary file of SQLite, has texts of any length, and raises an error
    for a damaged shard: a command that runs once needs all rows.
    """

    def __init__(self, paths: RunPaths, folder: Path | None) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._is_complete = folder is None
        if folder is None:
            self._database = _connect_database("")
            self._database.executescript(_RECREATE_TABLES_SQL)
            return
        name = hashlib.sha256(os.fsencode(paths.root)).hexdigest()[:24]
        make_private_folder(folder)
        self._database = _open_database(folder / f"{name}.sqlite")

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def index_new_rows(self) -> int:
        """Add shards and batches that are new, and return the number of new rows."""
        with self._lock:
            self._problems = {}  # shards that failed are read again
            sealed = read_index(self._paths.shard_index_dir)
            known = dict(self._database.execute("SELECT file, digest FROM shards"))
            if known.keys() - {shard.file for shard in sealed} or any(
                known.get(shard.file, shard.digest) != shard.digest for shard in sealed
            ):  # another run is at this path now
                self._database.executescript(_RECREATE_TABLES_SQL)
                known = {}
            added = sum(
                self._index_shard_rows(self._paths.shards_dir / shard.file, shard.digest)
                for shard in sealed
                if shard.file not in known
            )
            self._index_new_batches(has_new_rows=added > 0)
            return added

    def index_file(self, path: Path) -> None:
        with self._lock:
            self._index_shard_rows(path, "")
            self._index_new_batches(has_new_rows=True)

    def list_read_problems(self) -> list[str]:
        with self._lock:
            return [f"{source}: {problem}" for source, problem in self._problems.items()]

    def find_page(
        self,
        row_filter: str = "",
        sort_column: str = "",
        *,
        descending: bool = True,
        offset: int,
        count: int,
    ) -> RowPage:
        """Return a page of the rows that match an expression of `areal-hpc shards show --where`."""
        condition, values = _compile_row_filter(row_filter)
        order, order_values = _compile_order(sort_column, "DESC" if descending else "ASC")
        query = f"SELECT id FROM rows WHERE {condition} ORDER BY {order}"
        with self._lock:
            (total,) = self._database.execute("SELECT COUNT(*) FROM rows").fetchone()
            ids = [id_ for (id_,) in self._database.execute(query, [*values, *order_values])]
            shown = ids[offset : offset + count]
            listed = (
                f"SELECT id, {_LISTED_SQL} FROM rows WHERE id IN ({', '.join('?' * len(shown))})"
            )
            rows = {row.pop("id"): row for row in self._select_as_dicts(listed, shown)}
            return RowPage([rows[id_] for id_ in shown], len(ids), total)

    def find_values(
        self,
        columns: Sequence[str] = (),
        row_filter: str = "",
        *,
        ticket_id: int | None = None,
        sort_descending_by: str = "",
    ) -> list[tuple[Any, ...]]:
        """Return shard, row and fields of the rows that match, as recorded or sorted by a field."""
        condition, values = _compile_row_filter(row_filter)
        if ticket_id is not None:
            condition = f"({condition}) AND ticket = ? AND eval_step < 0"
            values = [*values, ticket_id]
        compiled = [get_column_sql(column) for column in columns]
        selected = ", ".join(["shard", "row", *(sql for sql, _ in compiled)])
        order, order_values = ("id", list[str]())
        if sort_descending_by:
            order, order_values = _compile_order(sort_descending_by, "DESC")
        bound = [*(value for _, used in compiled for value in used), *values, *order_values]
        with self._lock:
            return self._database.execute(
                f"SELECT {selected} FROM rows WHERE {condition} ORDER BY {order}", bound
            ).fetchall()

    def select_sample_rows(self, count: int) -> list[JsonObject]:
        """Select rows of a whole run: failed, held-out, and groups of up to eight steps."""
        steps = "SELECT DISTINCT step FROM rows WHERE kind = 'train' ORDER BY step"
        with self._lock:
            trained = [step for (step,) in self._database.execute(steps)]
            indices = {i * (len(trained) - 1) // 7 for i in range(8)} if trained else set()
            chosen = [trained[index] for index in sorted(indices)]
            rows = self._select_as_dicts(
                f"SELECT {_LISTED_SQL} FROM rows WHERE kind = 'failed' ORDER BY id DESC LIMIT ?",
                (count // 10,),
            )
            rows += self._select_as_dicts(
                f"SELECT {_LISTED_SQL} FROM rows WHERE kind NOT IN ('failed', 'train') "
                "ORDER BY step DESC, id LIMIT ?",
                (count // 5,),
            )
            for step in reversed(chosen):
                rows += self._select_as_dicts(
                    f"SELECT {_LISTED_SQL} FROM rows WHERE kind = 'train' AND step IS ? "
                    "ORDER BY ticket, attempt, episode, row LIMIT ?",
                    (step, count * 7 // 10 // len(chosen)),
                )
            return rows

    def select_related_rows(self, shard: str, row: int) -> JsonObject:
        """Return a row's step, the episodes of its group, and rows of its task at other times."""
        with self._lock:
            matches = self._select_as_dicts(
                "SELECT * FROM rows WHERE shard = ? AND row = ?", (shard, row)
            )
            if not matches:
                raise RecipeError(f"{shard} has no indexed row {row}", key="row")
            (origin,) = matches
            group = self._select_as_dicts(
                f"SELECT {_LISTED_SQL} FROM rows WHERE ticket = ? AND attempt = ? "
                "AND eval_step = ? AND own_group = ? ORDER BY episode, row LIMIT 200",
                (
                    *(origin["ticket"], origin["attempt"]),
                    *(origin["eval_step"], origin["own_group"]),
                ),
            )
            # Evaluation sets number their tasks alike; a ticket id stands for a task of one set.
            same, number = (
                ("ticket = ? AND eval_step >= 0", origin["ticket"])
                if origin["eval_step"] >= 0
                else ("task = ? AND eval_step < 0", origin["task"])
            )
            task = self._select_as_dicts(
                f"SELECT {_LISTED_SQL} FROM rows WHERE {same} AND kind = ? "
                "AND NOT (ticket = ? AND attempt = ? AND eval_step = ?) ORDER BY step LIMIT 200",
                (number, origin["kind"], origin["ticket"], origin["attempt"], origin["eval_step"]),
            )
            return {"step": origin["step"], "group": group, "task_rows": task}

    def count_failure_causes(self) -> list[JsonObject]:
        query = (
            "SELECT cause, COUNT(*) AS count FROM rows "
            "WHERE kind = 'failed' GROUP BY cause ORDER BY count DESC LIMIT 50"
        )
        with self._lock:
            return self._select_as_dicts(query, ())

    def _select_as_dicts(self, query: str, values: Sequence[Any]) -> list[JsonObject]:
        with closing(self._database.execute(query, values)) as cursor:
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor]

    def _index_shard_rows(self, path: Path, digest: str) -> int:
        file = path.name
        try:
            max_text_chars = None if self._is_complete else MAX_TEXT_CHARS
            values = list(_iterate_row_values(ShardReader(path), max_text_chars))
        except ShardError as error:
            if self._is_complete:
                raise
            self._problems[file] = str(error)
            return 0
        ids_of_shard = "SELECT id FROM rows WHERE shard = ?"
        with self._database:
            # Another process may have added it first. This write takes the lock that guards ids.
            self._database.execute(f"DELETE FROM texts WHERE id IN ({ids_of_shard})", (file,))
            self._database.execute("DELETE FROM rows WHERE shard = ?", (file,))
            (last,) = self._database.execute("SELECT MAX(id) FROM rows").fetchone()
            ids = range(first := (last or 0) + 1, first + len(values))
            self._database.executemany(
                _INSERT_ROW_SQL,
                [{"id": id_, **row} for id_, (row, _) in zip(ids, values, strict=True)],
            )
            self._database.executemany(
                "INSERT INTO texts VALUES (?, ?)",
                [(id_, text) for id_, (_, text) in zip(ids, values, strict=True)],
            )
            self._database.execute("INSERT OR REPLACE INTO shards VALUES (?, ?)", (file, digest))
        return len(values)

    def _index_new_batches(self, *, has_new_rows: bool) -> None:
        known = {step for (step,) in self._database.execute("SELECT step FROM batches")}
        for step in list_manifest_steps(self._paths):
            if step in known:
                continue
            try:
                tickets = read_manifest(self._paths, step).tickets
            except ShardError as error:
                self._problems[f"batch {step}"] = str(error)
                continue
            with self._database:
                self._database.executemany(
                    "INSERT OR REPLACE INTO tickets VALUES (?, ?, ?)",
                    [(ticket.ref.ticket_id, ticket.ref.attempt, step) for ticket in tickets],
                )
                self._database.execute("INSERT OR IGNORE INTO batches VALUES (?)", (step,))
            has_new_rows = True
        if has_new_rows:
            with self._database:
                self._database.execute(
                    "UPDATE rows SET step = (SELECT trained.step FROM tickets AS trained WHERE "
                    "trained.ticket = rows.ticket AND trained.attempt = rows.attempt) "
                    "WHERE kind = 'train' AND step IS NULL"
                )


def get_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "areal_hpc" / "dashboard"


def make_private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ClusterError(
            f"{folder} is open to other users",
            key="XDG_CACHE_HOME",
            hint=f"chmod 700 {folder}, or name another folder",
        )


def _compile_row_filter(row_filter: str) -> SqlCondition:
    return compile_filter(row_filter) if row_filter.strip() else SqlCondition("1", [])


def _compile_order(sort_column: str, direction: str) -> tuple[str, list[str]]:
    """Return the SQL order of rows, those without a value last, and the values for each `?`."""
    if not sort_column:
        return f"id {direction}", []
    column, values = get_column_sql(sort_column)
    return f"{column} IS NULL, {column} {direction}, id", [*values, *values]


def _open_database(file: Path) -> sqlite3.Connection:
    file.touch(mode=0o600)
    database = _connect_database(file)
    try:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        (state,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:  # locked, or a file system without locks
        database.close()
        raise
    except sqlite3.DatabaseError as error:
        version, state = 0, str(error)
    if state != "ok":
        database.close()
        file.unlink()  # processes that have it open keep it
        file.touch(mode=0o600)
        database, version = _connect_database(file), 0
    if version != TABLES_VERSION:
        database.executescript(_RECREATE_TABLES_SQL)
    database.execute("PRAGMA synchronous = OFF")  # a damaged index is made again
    return database


def _connect_database(file: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(file, check_same_thread=False, timeout=30.0)
    database.create_function(
        "casefold", 1, lambda text: None if text is None else text.casefold(), deterministic=True
    )
    return database


def _iterate_row_values(
    reader: ShardReader, max_text_chars: int | None
) -> Iterator[tuple[JsonObject, str]]:
    for index, row in enumerate(reader.read_rows(range(reader.num_rows))):
        text = msgspec.json.encode(row.meta.get("messages")).decode()[:max_text_chars]
        values = {"shard": reader.path.name, "row": index, **_compute_row_values(row)}
        yield values, text.casefold()


def _compute_row_values(row: TrajectoryRow) -> JsonObject:
    record = row.record
    is_sampled = row.loss_mask_T == 1
    versions = row.versions_T[is_sampled]
    oldest, newest = (
        (_format_version(int(versions.min())), _format_version(int(versions.max())))
        if len(versions)
        else (None, None)
    )
    return {
        "kind": row.kind.label,
        "step": row.eval_step if row.eval_step >= 0 else None,
        "eval_step": row.eval_step,
        "ticket": row.ticket_id,
        "attempt": row.attempt,
        "episode": row.episode,
        "reward": row.reward,
        "length": len(versions),
        "tokens": row.num_tokens,
        "calls": len(record.calls) or None,
        "seconds": record.ended_at - record.started_at if record.ended_at else None,
        "task": record.task_index if record.task_index >= 0 else None,
        "cell": record.cell,
        "finish": record.calls[-1].finish_reason if record.calls else None,
        "cause": record.cause,
        "note": "\n".join(call.reward.note for call in record.calls if call.reward),
        "oldest": oldest,
        "newest": newest,
        "own_group": name_own_group(row),
        "named": json.dumps(_collect_reward_numbers(record)),
        "question": _excerpt_message(row, "user", 0),
        "reply": _excerpt_message(row, "assistant", -1),
    }


def name_own_group(row: TrajectoryRow) -> str:
    """Return the session of a row that is of no ticket: it is a group; empty for other rows."""
    return row.record.session_id if row.kind is RowKind.PERSONAL else ""


def _excerpt_message(row: TrajectoryRow, role: str, index: int) -> str:
    messages = [message for message in get_messages(row) if message.get("role") == role]
    words = " ".join(extract_text(messages[index].get("content")).split()) if messages else ""
    cut = "…" if len(words) > MAX_EXCERPT_CHARS else ""
    return words[:MAX_EXCERPT_CHARS] + cut


@lru_cache(maxsize=4096)
def _format_version(packed_version: int) -> str:
    return str(WeightVersion.unpack(packed_version))


def _collect_reward_numbers(record: RowRecord) -> dict[str, float]:
    named: dict[str, float] = {}
    for call in record.calls:
        if call.reward:
            named |= {f"part.{name}": value for name, value in call.reward.parts.items()}
            named |= {f"metric.{name}": value for name, value in call.reward.metrics.items()}
    return named

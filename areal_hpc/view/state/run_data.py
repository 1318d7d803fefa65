"""`areal_hpc.open_run`: what a run has recorded, as columns of NumPy, for notebooks. Read-only."""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from areal_hpc.errors import RecipeError
from areal_hpc.evaluation.set_names import VALIDATION_SET_NAME
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.rundir.manifests import list_kept_evaluations
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import read_run_recipe
from areal_hpc.rundir.telemetry.span_reader import read_spans
from areal_hpc.shards.index import read_index
from areal_hpc.shards.reader import ShardReader
from areal_hpc.view.transcripts.row_filter import TYPE_BY_FIELD
from areal_hpc.view.transcripts.row_index import RowIndex
from areal_hpc.wire.trajectory import TrajectoryRow

Column = npt.NDArray[Any]
_TRAJECTORY_FIELDS = [name for name in TYPE_BY_FIELD if name not in ("note", "text")]


class Columns(Mapping[str, Column]):
    """Named columns of one length: numbers as float64, NaN where there is none, else objects."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> None:
        self._length = len(rows)
        found = dict.fromkeys([*names, *(name for row in rows for name in row)])
        self._columns = {name: _make_column([row.get(name) for row in rows]) for name in found}

    def __getitem__(self, column_name: str) -> Column:
        return self._columns[column_name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def n_rows(self) -> int:
        """Length of every column."""
        return self._length

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` of the columns; ImportError where pandas is not installed."""
        return importlib.import_module("pandas").DataFrame(self._columns)


def _make_column(values: Sequence[Any]) -> Column:
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([np.nan if one is None else one for one in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # lists of one length would be taken for a matrix
        column[place] = value
    return column


class RunData:
    """A run's records, each read when it is first asked for and kept.

    A run that goes on is seen as it was then; open it again to see more.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """The run directory."""
        self._paths = RunPaths(path)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Its resolved recipe, by section."""
        return read_run_recipe(self._paths.recipe)

    @cached_property
    def metrics(self) -> Columns:
        """A row per step, with the metrics of docs/metrics.md."""
        return Columns(read_metrics(self._paths.metrics))

    @cached_property
    def trajectories(self) -> Columns:
        """A row per recorded trajectory: its place (`shard`, `row`), and what `--where` knows."""
        with closing(RowIndex(self._paths, None)) as index:
            index.index_new_rows()
            found = index.find_values(_TRAJECTORY_FIELDS)
        names = ("shard", "row", *_TRAJECTORY_FIELDS)
        return Columns([dict(zip(names, one, strict=True)) for one in found], names)

    @cached_property
    def calls(self) -> Columns:
        """A row per model call: the place of its trajectory, then the fields of its record."""
        names = ("shard", "row", "call", "asked_at", "answered_at", "prompt_tokens", "reply_tokens")
        rows = [
            {
                "shard": sealed.file,
                "row": row,
                "call": place,
                "asked_at": call.asked_at,
                "answered_at": call.answered_at,
                "prompt_tokens": call.prompt_tokens,
                "reply_tokens": call.reply_tokens,
                "cached_tokens": call.cached_tokens,
                "finish": call.finish_reason,
                "reward": call.reward.value if call.reward else None,
            }
            for sealed in read_index(self._paths.shard_index_dir)
            for row, record in enumerate(
                ShardReader(self._paths.shards_dir / sealed.file).read_records()
            )
            for place, call in enumerate(record.calls)
        ]
        return Columns(rows, names)

    @cached_property
    def spans(self) -> Columns:
        """A row per span: process, node, lane, name, Unix times of the ledger's node, facts."""
        rows = [
            {"process": one.name, "node": one.node, "lane": span.lane, "name": span.name}
            | {"begin": span.begin, "end": span.end}
            | span.facts
            for one in read_spans(self._paths)
            for span in one.spans
        ]
        return Columns(rows, ("process", "node", "lane", "name", "begin", "end"))

    @cached_property
    def groups(self) -> Columns:
        """A row per group of a training ticket; its step is NaN while no batch has it."""
        table = self.trajectories
        rewards: dict[tuple[float, float], dict[float, list[float]]] = {}
        steps: dict[tuple[float, float], float] = {}
        for at in np.flatnonzero(table["kind"] == "train"):
            key = (table["ticket"][at], table["attempt"][at])
            steps[key] = table["step"][at]
            of_episode = rewards.setdefault(key, {}).setdefault(table["episode"][at], [])
            of_episode.append(table["reward"][at])
        # Rows of an episode differ where its agent gave rewards itself: it counts as their mean.
        means = {key: [np.mean(rows) for rows in one.values()] for key, one in rewards.items()}
        rows = [
            {
                "step": steps[ticket, attempt],
                "ticket": ticket,
                "attempt": attempt,
                "episodes": len(group),
                "reward_mean": float(np.mean(group)),
                "reward_std": float(np.std(group)),
            }
            for (ticket, attempt), group in means.items()
        ]
        names = ("step", "ticket", "attempt", "episodes", "reward_mean", "reward_std")
        return Columns(rows, names)

    @cached_property
    def evaluations(self) -> Columns:
        """A row per sample of an evaluated task: what it earned, and what it answered."""
        rows = [
            {
                "step": result.step,
                "set": name,
                "task": task,
                "sample": sample,
                "reward": reward,
                "answer": result.answers[task][sample] if result.answers else "",
            }
            for name, result in list_kept_evaluations(self._paths, VALIDATION_SET_NAME)
            for task, rewards in enumerate(result.list_sample_rewards())
            for sample, reward in enumerate(rewards)
        ]
        return Columns(rows, ("step", "set", "task", "sample", "reward", "answer"))

    def read_trajectory(self, shard: str, row: int) -> TrajectoryRow:
        """One trajectory with its tokens: ids, mask, log-probabilities and weight versions."""
        (found,) = ShardReader(self._paths.shards_dir / shard).read_rows([int(row)])
        return found


def open_run(path: str | Path) -> RunData:
    """Open a run directory for reading: its metrics, trajectories, groups, calls, evaluations.

    Raises:
        RecipeError: It is not the directory of a run.
    """
    root = Path(path).expanduser()
    if not RunPaths(root).recipe.exists():
        raise RecipeError(
            "this is not the directory of a run: it has no recipe",
            key=str(root),
            hint="give the directory that areal-hpc run printed: FILEROOT/EXPERIMENT/TRIAL",
        )
    return RunData(root)

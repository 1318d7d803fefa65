"""`areal_hpc.open_run`: records of a run as columns of NumPy, for notebooks. Read-only."""

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
    """Named columns of one length: numbers as float64 with NaN for none, others as objects."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> None:
        self._length = len(rows)
        fields = dict.fromkeys([*names, *(name for row in rows for name in row)])
        self._columns = {name: _make_column([row.get(name) for row in rows]) for name in fields}

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
        """Return the columns as a `pandas.DataFrame`; ImportError if pandas is not installed."""
        return importlib.import_module("pandas").DataFrame(self._columns)


def _make_column(values: Sequence[Any]) -> Column:
    if all(value is None or isinstance(value, int | float) for value in values):
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # NumPy would make a matrix of lists of one length
        column[index] = value
    return column


class RunData:
    """Records of a run, each read at its first use and kept.

    Records that a run adds later do not appear; open it again to see them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """Run directory."""
        self._paths = RunPaths(path)

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Resolved recipe, by section."""
        return read_run_recipe(self._paths.recipe)

    @cached_property
    def metrics(self) -> Columns:
        """A row per step, with the metrics of docs/metrics.md."""
        return Columns(read_metrics(self._paths.metrics))

    @cached_property
    def trajectories(self) -> Columns:
        """A row per recorded trajectory: `shard`, `row`, and the fields of `--where`."""
        with closing(RowIndex(self._paths, None)) as index:
            index.index_new_rows()
            rows = index.find_values(_TRAJECTORY_FIELDS)
        names = ("shard", "row", *_TRAJECTORY_FIELDS)
        return Columns([dict(zip(names, values, strict=True)) for values in rows], names)

    @cached_property
    def calls(self) -> Columns:
        """A row per model call: shard and row of its trajectory, then fields of its record."""
        names = ("shard", "row", "call", "asked_at", "answered_at", "prompt_tokens", "reply_tokens")
        rows = [
            {
                "shard": sealed.file,
                "row": row,
                "call": number,
                "asked_at": call.asked_at,
                "answered_at": call.answered_at,
                "prompt_tokens": call.prompt_tokens,
                "reply_tokens": call.reply_tokens,
                "cached_tokens": call.cached_tokens,
                "agent": call.agent_id,
                "finish": call.finish_reason,
                "reward": call.reward.value if call.reward else None,
            }
            for sealed in read_index(self._paths.shard_index_dir)
            for row, record in enumerate(
                ShardReader(self._paths.shards_dir / sealed.file).read_records()
            )
            for number, call in enumerate(record.calls)
        ]
        return Columns(rows, names)

    @cached_property
    def spans(self) -> Columns:
        """A row per span: process, node, lane, name, Unix times by its node's clock, facts."""
        rows = [
            {"process": process.name, "node": process.node, "lane": span.lane, "name": span.name}
            | {"begin": span.begin, "end": span.end}
            | span.facts
            for process in read_spans(self._paths)
            for span in process.spans
        ]
        return Columns(rows, ("process", "node", "lane", "name", "begin", "end"))

    @cached_property
    def groups(self) -> Columns:
        """A row per group of a training ticket; its step is NaN while no batch has it."""
        table = self.trajectories
        rewards: dict[tuple[float, float], dict[float, list[float]]] = {}
        steps: dict[tuple[float, float], float] = {}
        for index in np.flatnonzero(table["kind"] == "train"):
            key = (table["ticket"][index], table["attempt"][index])
            steps[key] = table["step"][index]
            episode_rewards = rewards.setdefault(key, {}).setdefault(table["episode"][index], [])
            episode_rewards.append(table["reward"][index])
        # Rows of an episode differ if its agent set rewards: their mean is that of the episode.
        means = {key: [np.mean(rows) for rows in group.values()] for key, group in rewards.items()}
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
        """A row per sample of an evaluated task: its reward and its answer."""
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
        """Read a trajectory with its token ids, mask, log-probabilities and weight versions."""
        (trajectory,) = ShardReader(self._paths.shards_dir / shard).read_rows([int(row)])
        return trajectory


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

"""Metrics of a run for a tracker such as wandb, in parts: each holds the rows that are new.

A tracker's program writes a part under a temporary name, and a complete part is renamed: whatever
is killed, no step is written twice and none is left out. While the run goes on, rows from the
newest checkpoint on are held back, as a resumed trainer may take them back.
"""

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.keys import hide_private_values_equal_in
from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.rundir.files import fsync_path, fsync_tree, write_once
from areal_hpc.rundir.jsonl import JsonMetricRow, read_readable_records, replace_lines
from areal_hpc.rundir.lock import hold_lock
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_inputs import read_run_recipe

PROGRAM_TIMEOUT_S = 1800.0
MAX_PART_ROWS = 200
"""Rows of a part, so that its program ends in time for a run of any length."""
BUILT_IN_PROGRAMS = {
    name: Path(__file__).with_name(f"{name}_program.py") for name in ("wandb", "otlp")
}


class TrackerProgramInput(msgspec.Struct, frozen=True):
    """JSON on the standard input of a tracker's program, whose argument is the folder."""

    id: str
    """Id of the run, the same for all of its parts."""
    name: str
    """`experiment/trial`."""
    project: str
    """Project of the tracker; empty for its default."""
    config: dict[str, Any]
    """Recipe, without values that may be secrets."""
    rows: list[JsonMetricRow]
    """Metrics with their `step`; metrics that came late have a row of their own."""
    run_dir: str
    """Path of the run, for what else a program reads."""


@dataclass(frozen=True, slots=True)
class TrackerChoice:
    name: str
    program: Path
    python: str
    project: str = ""


def choose_tracker(tracker_name_or_path: str, python: str, project: str) -> TrackerChoice:
    if tracker_name_or_path in BUILT_IN_PROGRAMS:
        return TrackerChoice(
            tracker_name_or_path, BUILT_IN_PROGRAMS[tracker_name_or_path], python, project
        )
    path = Path(tracker_name_or_path)
    if path.suffix == ".py" and path.is_file():
        return TrackerChoice(path.stem, path.resolve(), python, project)
    raise RecipeError(
        f"expected {' or '.join(BUILT_IN_PROGRAMS)}, or a program FILE.py, "
        f"got {tracker_name_or_path!r}",
        key="--tracker",
        hint="docs/metrics.md describes the input of a program",
    )


def write_tracker_parts(paths: RunPaths, tracker: TrackerChoice) -> int:
    """Write settled rows that are new as further parts, and return their number."""
    target = paths.tracker(tracker.name)
    with hold_lock(target.lock):
        files = map(target.get_rows_file, target.list_parts())
        written = chain.from_iterable(map(read_readable_records, files))
        rows = list(find_unwritten_metrics(list_settled_rows(paths), written))
        if rows:
            write_once(target.run_id, secrets.token_hex(4).encode())
        for begin in range(0, len(rows), MAX_PART_ROWS):
            _write_part(paths, tracker, rows[begin : begin + MAX_PART_ROWS])
    return len(rows)


def _write_part(paths: RunPaths, tracker: TrackerChoice, rows: list[JsonMetricRow]) -> None:
    target, recipe = paths.tracker(tracker.name), read_run_recipe(paths.recipe)
    part = TrackerProgramInput(
        id=target.run_id.read_text(),
        name=paths.run_name,
        project=tracker.project,
        config=hide_private_values_equal_in(recipe, recipe),
        rows=rows,
        run_dir=str(paths.root),
    )
    shutil.rmtree(target.unfinished_part, ignore_errors=True)
    target.unfinished_part.mkdir()
    _run_program(tracker, part, target.unfinished_part)
    replace_lines(target.get_rows_file(target.unfinished_part), rows)
    fsync_tree(target.unfinished_part)
    target.unfinished_part.rename(target.get_part(len(target.list_parts()) + 1))
    fsync_path(target.root)


def list_settled_rows(paths: RunPaths) -> list[dict[str, Any]]:
    """Return the rows that no resumed trainer takes back: all of a finished run."""
    rows = read_metrics(paths.metrics)
    if paths.finished_marker.exists():
        return rows
    newest = find_latest_checkpoint(paths.checkpoints_dir)
    saved = newest.state.step if newest else 0
    return [row for row in rows if row["step"] < saved]


def find_unwritten_metrics(
    settled: list[dict[str, Any]], written: Iterator[dict[str, Any]]
) -> Iterator[JsonMetricRow]:
    names_by_step: dict[int, set[str]] = {}
    for row in written:
        names_by_step.setdefault(row["step"], set()).update(row)
    for row in settled:
        written_names = names_by_step.get(row["step"], set())
        new = {name: value for name, value in row.items() if name not in written_names}
        if new:
            yield {"step": row["step"], **new}


def _run_program(tracker: TrackerChoice, program_input: TrackerProgramInput, folder: Path) -> None:
    command = [tracker.python, str(tracker.program), str(folder)]
    try:
        result = subprocess.run(
            command,
            input=msgspec.json.encode(program_input),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(
            f"the tracker's program did not run: {error}", key=str(tracker.program)
        ) from error
    if result.returncode:
        message = result.stderr.decode(errors="replace").strip()
        if "ModuleNotFoundError" in message:
            raise RecipeError(
                f"{tracker.python}: {message.splitlines()[-1]}",
                key="--python",
                hint="name a Python that has it; requirements/wandb.txt is a lock for wandb",
            )
        raise ClusterError(
            f"the tracker's program ended with exit code {result.returncode}: {message[-800:]}",
            key=str(tracker.program),
            hint="nothing is lost: the same command writes this part again",
        )

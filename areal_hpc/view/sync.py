"""Metrics of a run for a tracker, in parts: each holds what is new since those before it.

A part is written aside by a tracker's program and gets its name when it is whole, so that whatever
is killed, no step is written twice and none is left out. Rows that a resumed trainer may take back
wait until they are settled: those of the newest checkpoint and later, while the run goes on.
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
BUILT_IN_PROGRAMS = {"wandb": Path(__file__).with_name("wandb_program.py")}


class TrackerProgramInput(msgspec.Struct, frozen=True):
    """What a tracker's program gets on standard input, as JSON; its argument is the folder."""

    id: str
    """Of the run, the same for all of its parts."""
    name: str
    """`experiment/trial`."""
    project: str
    """Empty: the tracker's default."""
    config: dict[str, Any]
    """The recipe, without values that may be secrets."""
    rows: list[JsonMetricRow]
    """Metrics with their `step`; what became known late of a step has a row of its own."""


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
        hint="docs/metrics.md says what a program gets",
    )


def write_tracker_part(paths: RunPaths, tracker: TrackerChoice) -> int:
    """Write what is settled and new as one more part; the number of its rows."""
    place = paths.tracker(tracker.name)
    with hold_lock(place.lock):
        files = map(place.get_rows_file, place.list_parts())
        written = chain.from_iterable(map(read_readable_records, files))
        rows = list(find_unwritten_metrics(list_settled_rows(paths), written))
        if not rows:
            return 0
        write_once(place.run_id, secrets.token_hex(4).encode())
        recipe = read_run_recipe(paths.recipe)
        part = TrackerProgramInput(
            id=place.run_id.read_text(),
            name=paths.run_name,
            project=tracker.project,
            config=hide_private_values_equal_in(recipe, recipe),
            rows=rows,
        )
        shutil.rmtree(place.unfinished_part, ignore_errors=True)
        place.unfinished_part.mkdir()
        _run_program(tracker, part, place.unfinished_part)
        replace_lines(place.get_rows_file(place.unfinished_part), rows)
        fsync_tree(place.unfinished_part)
        place.unfinished_part.rename(place.get_part(len(place.list_parts()) + 1))
        fsync_path(place.root)
    return len(rows)


def list_settled_rows(paths: RunPaths) -> list[dict[str, Any]]:
    """The rows that no resumed trainer takes back: all of a finished run."""
    rows = read_metrics(paths.metrics)
    if paths.finished_marker.exists():
        return rows
    newest = find_latest_checkpoint(paths.checkpoints_dir)
    saved = newest.state.step if newest else 0
    return [row for row in rows if row["step"] < saved]


def find_unwritten_metrics(
    settled: list[dict[str, Any]], written: Iterator[dict[str, Any]]
) -> Iterator[JsonMetricRow]:
    known: dict[int, set[str]] = {}
    for row in written:
        known.setdefault(row["step"], set()).update(row)
    for row in settled:
        held = known.get(row["step"], set())
        new = {name: value for name, value in row.items() if name not in held}
        if new:
            yield {"step": row["step"], **new}


def _run_program(tracker: TrackerChoice, program_input: TrackerProgramInput, folder: Path) -> None:
    command = [tracker.python, str(tracker.program), str(folder)]
    try:
        ended = subprocess.run(
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
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip()
        if "ModuleNotFoundError" in said:
            raise RecipeError(
                f"{tracker.python}: {said.splitlines()[-1]}",
                key="--python",
                hint="name a Python that has it; requirements/wandb.txt is a lock for wandb",
            )
        raise ClusterError(
            f"the tracker's program ended with exit code {ended.returncode}: {said[-800:]}",
            key=str(tracker.program),
            hint="nothing is lost: the same command writes this part again",
        )

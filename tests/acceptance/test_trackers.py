"""Trackers: what they hold of a run is what its metrics say, once; the run outlives them.

wandb comes from its own lock and is read back offline.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.metrics.writer import format_tensorboard_tag
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.paths import RunPaths
from tests.support.commands import areal_hpc, run_program, said_by, start_areal_hpc
from tests.support.environments import CHECKOUT
from tests.support.small_run import LIGHT, SmallRun, interrupted_at_end, kill_all

pytestmark = pytest.mark.timeout(900)

READER = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2

def read_records(path):
    # wandb's own file: a header, then a LevelDB log of its messages in blocks of 32 KiB.
    data, at, message = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:
            break
        message, at = message + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""

for record in read_records(sys.argv[1]):
    kind = record.WhichOneof("record_type")
    if kind == "run":
        print(json.dumps({"id": record.run.run_id, "project": record.run.project}))
    if kind == "history":
        items = record.history.item
        row = {one.key or one.nested_key[0]: json.loads(one.value_json) for one in items}
        print(json.dumps({"row": {k: v for k, v in row.items() if k[0] != "_"}}))
"""


@pytest.fixture(scope="module")
def wandb_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("wandb")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = home / "bin" / "python"
    lock = CHECKOUT / "requirements" / "wandb.txt"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r", lock)
    said_by(run_program(python, *install, timeout_s=600))
    return python


def read_offline_runs(paths: RunPaths, python: Path) -> Iterator[dict[str, Any]]:
    for part in paths.tracker("wandb").list_parts():
        (file,) = part.glob("wandb/offline-run-*/run-*.wandb")
        for line in said_by(run_program(python, "-c", READER, file)).splitlines():
            yield json.loads(line)


def read_wandb_rows(paths: RunPaths, python: Path, project: str) -> dict[int, dict[str, Any]]:
    """By step, what all parts hold, which must be of one run and have no value twice."""
    records = list(read_offline_runs(paths, python))
    heads = [one for one in records if "id" in one]
    assert {one["id"] for one in heads} == {paths.tracker("wandb").run_id.read_text()}
    assert {one["project"] for one in heads} == {project}
    merged: dict[int, dict[str, Any]] = {}
    for one in records:
        if "row" in one:
            held = merged.setdefault(one["row"]["step"], {})
            assert not (held.keys() & one["row"].keys()) - {"step"}, "a metric of a step twice"
            held |= one["row"]
    return merged


def read_tensorboard_rows(paths: RunPaths) -> dict[int, dict[str, float]]:
    """By step, what TensorBoard's own reader finds, with its tags; a value twice is refused."""
    board = EventAccumulator(str(paths.tensorboard_run_dir), size_guidance={"scalars": 0})
    board.Reload()
    found: dict[int, dict[str, float]] = {}
    for tag in board.Tags()["scalars"]:
        for event in board.Scalars(tag):
            row = found.setdefault(event.step, {})
            assert tag not in row, f"{tag} of step {event.step} twice"
            row[tag] = event.value
    return found


def keep_numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def kill_with_children(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a command and to the programs that it started."""
    for one in (*psutil.Process(process.pid).children(recursive=True), process):
        one.kill()
    process.communicate(timeout=60)


def test_a_run_that_was_killed_is_one_run_in_both_trackers_and_no_step_is_there_twice(
    wandb_python: Path, tmp_path: Path
) -> None:
    save_every = 5
    run = SmallRun(
        *(tmp_path / "runs", *LIGHT, "trainer.total_steps=5000"),
        *(f"trainer.checkpoint_every_steps={save_every}", "evaluation.every_steps=5"),
    )
    command = ("sync", run.paths.root, "--python", wandb_python, "--project", "killed")

    def list_steps() -> list[int]:
        return [row["step"] for row in read_metrics(run.paths.metrics)]

    def is_between_checkpoints() -> bool:
        """Some steps are told that no checkpoint has, and wandb has a part."""
        saved = [one.state.step for one in list_checkpoints(run.paths.checkpoints_dir)]
        parts = run.paths.tracker("wandb").list_parts()
        return bool(parts and saved) and max(list_steps()) >= max(saved) + 2

    with interrupted_at_end(run):
        run.start()
        run.await_true(run.paths.metrics.exists)
        follower = start_areal_hpc(*command, "--follow", environ=os.environ)
        try:
            run.await_true(is_between_checkpoints)
            assert run.process is not None
            kill_all(run.process, run.paths.root)
        finally:
            kill_with_children(follower)
    known = list_steps()[-1]
    kept = max(one.state.step for one in list_checkpoints(run.paths.checkpoints_dir))
    assert kept < known, "steps are trained again"
    steps = known + save_every
    run.override(f"trainer.total_steps={steps}")
    run.finish()
    said_by(areal_hpc(*command))
    rows = read_metrics(run.paths.metrics)
    assert [row["step"] for row in rows] == [*range(steps + 1)]
    assert len(run.paths.tracker("wandb").list_parts()) >= 2
    numbers = {row["step"]: keep_numbers(row) for row in rows}
    assert read_wandb_rows(run.paths, wandb_python, "killed") == numbers
    board = read_tensorboard_rows(run.paths)
    assert len([*run.paths.tensorboard_run_dir.glob("events.out.tfevents.*")]) >= 2, (
        "a file a start"
    )
    assert board.keys() == numbers.keys()
    for step, row in numbers.items():
        expected = {format_tensorboard_tag(name): value for name, value in row.items()}
        del expected["step"]
        assert board[step] == pytest.approx(expected, rel=1e-6), "float32"

"""A user's script with AReaL's imports starts our jobs and becomes a run like any other."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from areal_hpc.jobs.config import get_interpreter
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.chatml import TRAINING_TEXT
from tests.support.commands import audit_of, run_program
from tests.support.environments import CHECKOUT
from tests.support.run_files import logs_of
from tests.support.small_run import processes_of

FOLDER = Path(__file__).parent
CLIENTS = 2
"""Clients in each episode of the script, each with a row of its own."""
pytestmark = pytest.mark.timeout(400)


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    program = get_interpreter("agents", "auto")
    return run_program(program, *arguments, environ=environ, timeout_s=360)


def test_an_instance_of_a_script_is_trained_and_a_class_of_it_is_evaluated(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    make_tiny_model(model_dir, TRAINING_TEXT * 20, seed=5, max_position_embeddings=1024)
    answer = python(
        *("-m", "areal_hpc.areal", FOLDER / "script.py", "--config", FOLDER / "config.yaml"),
        *(f"cluster.fileroot={tmp_path}", f"actor.path={model_dir}"),
    )
    paths = RunPaths(tmp_path / "areal" / "script")
    assert answer.returncode == 0, answer.stdout + answer.stderr + logs_of(paths)
    assert "lost" not in answer.stdout
    assert [row["step"] for row in read_readable_records(paths.metrics)] == [0, 1, 2]
    recipe = yaml.safe_load(paths.recipe.read_text())
    assert recipe["rollout"]["workflow"] == "handed_over.agent"
    assert recipe["evaluation"]["workflow"] == "handed_over_for_evaluation.agent"
    assert recipe["train_dataset"]["path"] == str(paths.dataset("train"))
    assert len(paths.dataset("train").read_text().splitlines()) == 16
    manifest = yaml.safe_load(paths.manifest(1).read_text())
    assert {len(ticket["rows"]) for ticket in manifest["tickets"]} == {2 * CLIENTS}
    for step in (0, 2):
        judged = yaml.safe_load(paths.evaluation(step).read_text())
        assert (judged["n_tasks"], judged["failures"]) == (4, {})
    assert audit_of(paths.root) == "trained_once=4 duplicates=0 lost=0 open=0"
    # The recipe of the run is enough: any command continues with it, without the script.
    again = python("-m", "areal_hpc", "run", paths.recipe)
    assert "this run is finished" in again.stdout, again.stderr
    assert processes_of(paths.root) == []

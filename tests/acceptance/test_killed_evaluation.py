"""`areal-hpc eval`: evaluation sets without a trainer, killed and resumed."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS
from areal_hpc.rundir.manifests import read_evaluated_tickets
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.evaluation_report import read_report
from areal_hpc.view.transcripts.row_search import RowQuery, find_rows
from tests.support.commands import areal_hpc, said_by, start_areal_hpc
from tests.support.small_run import CUT_DOWN, LIGHT, kill_all, processes_of
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(900)

TASKS = 24
FEW = "{dataset: {generator: 'tests.support.sums:tasks', kwargs: {size: 6, seed: 5, terms: 2}}, "
SAMPLED = "n_samples: 2, sampling: {temperature: 1.0, max_new_tokens: 24}, metrics: [pass@k]}"


def list_arguments(model: Path, fileroot: Path) -> list[str]:
    return [
        *("eval", str(model), "--recipe", "recipes/quickstart.yaml"),
        *CUT_DOWN,
        *LIGHT,
        f"cluster.fileroot={fileroot}",
        f"evaluation.tasks={TASKS}",
        f"valid_dataset.kwargs.size={TASKS}",
        # Few at a time: there is a moment to kill it.
        *("rollout.n_samples=2", "rollout.max_concurrent_rollouts=2"),
        f"evaluation.sets.few={FEW}{SAMPLED}",
    ]


def count_rows(run_dir: Path) -> Counter[object]:
    """Recorded rows of each evaluation ticket."""
    return Counter(one.read().ticket_id for one in find_rows(run_dir, RowQuery())[0])


def test_an_evaluation_that_was_killed_repeats_no_task_and_compares_with_itself(
    model: Path, tmp_path: Path
) -> None:
    arguments = list_arguments(model, tmp_path / "runs")
    paths = RunPaths(tmp_path / "runs" / "quickstart" / f"eval-{model.name}")
    launcher = start_areal_hpc(*arguments, environ=os.environ)
    wait_for(
        lambda: (
            launcher.poll() is not None
            or len(read_evaluated_tickets(paths, STEP_OF_LOADED_WEIGHTS)) >= 4
        ),
        200,
    )
    kill_all(launcher, paths.root)
    launcher.communicate()
    done = {one.ticket_id for one in read_evaluated_tickets(paths, STEP_OF_LOADED_WEIGHTS)}
    assert 4 <= len(done) < TASKS + 6

    said = said_by(areal_hpc(*arguments, timeout_s=200))
    assert "valid" in said
    assert "pass@2" in said
    report = read_report(paths.root)
    assert [len(report.sets[name].samples) for name in ("valid", "few")] == [TASKS, 6]
    assert {len(samples) for samples in report.sets["few"].samples} == {2}
    rows = count_rows(paths.root)
    assert {ticket: rows[ticket] for ticket in done} == {
        ticket: 2 if ticket >= TASKS else 1 for ticket in done
    }
    assert not paths.evaluated_tickets(STEP_OF_LOADED_WEIGHTS).exists()
    assert processes_of(paths.root) == []

    # Everything is there: nothing is started, and it is as good as itself, to the last task.
    again = said_by(areal_hpc(*arguments, "--compare", str(paths.evaluation_report)))
    assert again.startswith("set ")
    assert "no difference is shown" in again
    assert json.loads(paths.evaluation_report.read_text())["model"] == str(model.resolve())

    # Of another model by the same name, or by other settings, these are not the results.
    other = shutil.copytree(model, tmp_path / "other" / model.name)
    mistaken = areal_hpc(*list_arguments(other, tmp_path / "runs"), "evaluation.n_samples=3")
    assert mistaken.returncode == 78
    assert f"not of {other}" in mistaken.stderr
    assert "set valid was played with 1, got 3" in mistaken.stderr

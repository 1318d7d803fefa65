"""`areal-hpc eval --submit`: an evaluation without a trainer as one Slurm job."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import read_submissions
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.evaluation_report import read_report
from tests.support.commands import areal_hpc, said_by
from tests.support.devclusters import CUT_DOWN, SLURM_POLL_S, Devcluster, devcluster
from tests.support.light_run import SIZES
from tests.support.small_run import LIGHT
from tests.support.sums import tasks
from tests.support.waiting import wait_for

TASKS = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "cluster", "--nodes=4") as found:
        yield found
        found.cancel_all()


@pytest.mark.timeout(400)
def test_an_evaluation_is_one_job_and_the_same_command_has_its_results(
    cluster: Devcluster, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    texts = [one["messages"][0]["content"] for one in tasks(200, 1, 5)]
    make_tiny_model(model, texts, seed=1, vocab=384, **SIZES)
    paths = RunPaths(tmp_path / "runs" / "quickstart" / "eval-model")
    command = (
        *("eval", model, "--recipe", "recipes/quickstart_slurm.yaml", "--set", "valid"),
        *("--submit", *CUT_DOWN, *LIGHT, f"cluster.fileroot={tmp_path / 'runs'}"),
        *(f"evaluation.tasks={TASKS}", "evaluation.n_samples=2"),
    )
    said = said_by(areal_hpc(*command, "--wait", environ=cluster.environ, timeout_s=300))
    job, caretaker = read_submissions(paths.submissions)
    assert (job.job, caretaker.job) == ("evaluation", "caretaker")
    assert "avg@2" in said
    wait_for(lambda: cluster.job_state(job.job_id) in ("COMPLETED", ""), 60, every_s=SLURM_POLL_S)
    samples = read_report(paths.root).sets["valid"].samples
    assert [len(one) for one in samples] == [2] * TASKS
    again = said_by(areal_hpc(*command, environ=cluster.environ))
    assert again.startswith("set ")
    assert len(read_submissions(paths.submissions)) == 2
    resumed = areal_hpc("resume", paths.root, environ=cluster.environ)
    assert resumed.returncode == 78
    assert "repeat the areal-hpc eval command" in resumed.stderr

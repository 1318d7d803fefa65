"""A user's script with `scheduler.type=slurm`: the jobs of `areal-hpc submit`, watched."""

from pathlib import Path

import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.jobs import read_submissions
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from tests.support.chatml import TRAINING_TEXT
from tests.support.commands import run_program, said_by
from tests.support.devclusters import Devcluster
from tests.support.environments import CHECKOUT, python_of

FOLDER = CHECKOUT / "tests" / "integration" / "areal"
SITE = (
    "slurm: {time_limit_minutes: 10, mem: 4G, cpus_per_task: 1, "
    "setup: [export OMP_NUM_THREADS=1]}\n"
)


@pytest.mark.timeout(500)
@pytest.mark.thorough
def test_a_script_submits_its_run_and_shows_progress(cluster: Devcluster, tmp_path: Path) -> None:
    model_dir, site = tmp_path / "model", tmp_path / "site.yaml"
    make_tiny_model(model_dir, TRAINING_TEXT * 20, seed=5, max_position_embeddings=1024)
    site.write_text(SITE)
    said = said_by(
        run_program(
            *(python_of("main"), "-m", "areal_hpc.areal", FOLDER / "script.py"),
            *("--config", FOLDER / "config.yaml", "trial_name=slurm"),
            *(f"cluster.fileroot={tmp_path / 'runs'}", f"actor.path={model_dir}"),
            *("scheduler.type=slurm", f"scheduler.site={site}"),
            environ={**cluster.environ, "PYTHONPATH": str(CHECKOUT)},
            timeout_s=400,
        )
    )
    paths = RunPaths(tmp_path / "runs" / "areal" / "slurm")
    assert "step      2/2" in said
    *submitted, caretaker = read_submissions(paths.submissions)
    assert [one.job for one in (*submitted, caretaker)] == ["trainer", "cell-0", "caretaker"]
    assert {cluster.job_state(one.job_id) for one in submitted} == {"COMPLETED"}
    assert [row["step"] for row in read_readable_records(paths.metrics)] == [0, 1, 2]

"""Limits of a cluster: `doctor` predicts sbatch's refusal, and `why` repeats it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import areal_hpc, run_program, said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import (
    HELD,
    JOBS,
    Devcluster,
    Submitting,
    devcluster,
    light_overrides,
    queued,
)
from tests.support.waiting import wait_for

RESTART_SLURMCTLD = """
import sys, time
from pathlib import Path
from slurm.devcluster.cluster import read_plan
from slurm.devcluster.daemons import start_daemon, stop_daemon
from slurm.devcluster.paths import DevclusterPaths

made = read_plan(DevclusterPaths(Path(sys.argv[1])))
slurmctld = next(one for one in made.daemons if one.name == "slurmctld")
stop_daemon(made, slurmctld)
start_daemon(made, slurmctld, time.monotonic() + float(sys.argv[2]))
"""
"""Start of slurmctld without `devcluster up`, which would write slurm.conf anew."""


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    """Two nodes, where a user of QOS `few` may have three jobs, of an hour each."""
    with devcluster(tmp_path_factory.mktemp("limited") / "state", "--nodes=2") as cluster:
        with (cluster.state_dir / "etc" / "slurm.conf").open("a") as conf:
            conf.write("AccountingStorageEnforce=associations,limits,qos\n")
            conf.write("PreemptType=preempt/qos\n")
        for change in (
            ("add", "qos", "few", "MaxSubmitJobsPerUser=3", "MaxWall=60", "Flags=DenyOnLimit"),
            ("modify", "qos", "few", "set", "PreemptMode=cancel", "GraceTime=45"),
            ("modify", "user", "where", "name=root", "set", "qos=normal,few"),
        ):
            cluster.slurm("sacctmgr", "--immediate", *change)
        said_by(run_program(sys.executable, "-c", RESTART_SLURMCTLD, cluster.state_dir, scaled(60)))
        wait_for(lambda: cluster.slurm("sinfo", "-h", "-p", "priority", "-o", "%D %T") == "2 idle")
        yield cluster


def doctor(cluster: Devcluster, fileroot: Path, *overrides: str, code: int = 0) -> str:
    recipe = ("recipes/quickstart_slurm.yaml", f"cluster.fileroot={fileroot}", *overrides)
    ended = areal_hpc("doctor", *recipe, environ=cluster.environ)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout


def test_doctor_compares_limits_with_the_jobs_of_the_recipe(
    limited: Devcluster, tmp_path: Path
) -> None:
    light = (*HELD, *light_overrides(tmp_path))
    output = doctor(limited, tmp_path, *light)
    assert "ok    job limits" in output
    few = (*light, "cluster.slurm.sbatch.qos=few")
    output = doctor(limited, tmp_path, *few, code=1)
    assert "fail  job limits" in output
    assert "QOS few allows 3 jobs at a time; the recipe submits 4" in output
    assert "ok    preemption QOS few  a preempted job has 45 s, in which it asks" in output
    output = doctor(limited, tmp_path, *few, "inference.cells=1")
    assert "QOS few allows 3 jobs at a time; the recipe submits 3, so that no caretaker" in output
    output = doctor(
        limited, tmp_path, *few, "inference.cells=1", "cluster.slurm.time_limit_minutes=90", code=1
    )
    assert "the job asks for 90 min; QOS few allows 60 min" in output
    waiting = limited.submit("true", "--hold", "--qos=few")
    output = doctor(limited, tmp_path, *few, "inference.cells=1")
    assert "warn  job limits" in output
    assert "submit when 1 have ended" in output
    limited.slurm("scancel", waiting)


@pytest.mark.thorough
def test_a_limit_that_passes_by_itself_is_worth_another_try_and_others_are_not(
    limited: Devcluster, tmp_path: Path
) -> None:
    run = Submitting(limited, tmp_path / "runs")
    root, light = str(run.paths.root), (*HELD, *light_overrides(tmp_path))
    refused = run.submit(*light, "cluster.slurm.sbatch.qos=few")
    assert refused.returncode == 75, refused.stderr
    assert "areal-hpc doctor" in refused.stderr
    assert queued(limited) == []
    why = run.call("why", root)
    assert why.returncode == 1
    assert "sbatch rejected job cell-1: " in why.stdout.splitlines()[0]
    assert "QOSMaxSubmitJobPerUserLimit" in why.stdout
    too_long = ("cluster.slurm.sbatch.qos=few", "cluster.slurm.time_limit_minutes=90")
    refused = run.submit(*light, *too_long, "--fresh")
    assert refused.returncode == 78, refused.stderr
    said_by(run.call("resume", root, "cluster.slurm.sbatch.qos=normal"))
    assert queued(limited) == JOBS
    said_by(run.call("cancel", root))

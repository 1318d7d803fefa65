"""Faults of machines and interventions of administrators that jobs outlive."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.supervised_jobs import TIME_LIMIT_MIN, OperatedRun, SupervisedJob
from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.devclusters import SLURM_POLL_S, Devcluster, stopped_slurmctld
from tests.support.process_commands import find_processes
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

SAFE = ("--partition=priority", "--requeue")
SUSPENDED_S = 5.0
AFTER_LIMIT_S = 60.0 * TIME_LIMIT_MIN + 15.0
"""Time from the start of a job with the shortest limit to its end, with Slurm's grace."""


@pytest.fixture
def job(cluster: Devcluster, tmp_path: Path) -> SupervisedJob:
    return SupervisedJob(cluster, tmp_path / "run", "trainer")


@contextmanager
def cut_off(cluster: Devcluster, node: str) -> Iterator[None]:
    """Take a node's network away while its processes go on."""
    network = json.loads((cluster.state_dir / "cluster.json").read_text())["facts"]["network"]
    link = f"adc{network}-{node}"
    subprocess.run(["ip", "link", "set", link, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", link, "up"], check=True)


def test_a_job_on_a_node_that_is_cut_off_goes_on_elsewhere_and_the_old_start_gives_way(
    job: SupervisedJob,
) -> None:
    job.submit("steady", *SAFE)
    job.awaits_told("began 1")
    lost = job.nodes()
    with cut_off(job.cluster, lost):
        job.awaits(lambda: "began 2" in job.told)
        assert job.nodes() != lost
        job.awaits(lambda: "saved 0" in job.told)
    assert (job.starts(), job.restarts()) == (2, 1)
    job.let_go()
    job.awaits_state("COMPLETED")
    wait_for(lambda: job.cluster.node_state(lost) == "idle", every_s=SLURM_POLL_S)


def test_a_job_that_is_suspended_goes_on_where_it_stood(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = OperatedRun.make(cluster, tmp_path, "suspended")
    trainer = run.submit("trainer", "steady", *SAFE)
    trainer.awaits_told("began 1")
    cluster.slurm("scontrol", "suspend", trainer.job_id)
    trainer.awaits_state("SUSPENDED")
    time.sleep(SUSPENDED_S)
    assert "SUSPENDED" in run.command("status")
    assert "suspend" in run.command("why", code=1).splitlines()[0]
    cluster.slurm("scontrol", "resume", trainer.job_id)
    trainer.let_go()
    trainer.awaits_state("COMPLETED")
    assert trainer.told == ["began 1", "done"]


def test_jobs_come_back_after_an_outage_in_which_a_limit_a_crash_and_a_stop_fall(
    cluster: Devcluster, tmp_path: Path
) -> None:
    limited, crashed, stopped = (
        SupervisedJob(cluster, tmp_path / name, "trainer") for name in ("a", "b", "c")
    )
    crashed.submit("steady", *SAFE)
    stopped.submit("steady", "--partition=priority", "--no-requeue")
    for job in (crashed, stopped):
        job.awaits_told("began 1")
    limited.submit("steady", *SAFE, f"--time={TIME_LIMIT_MIN}")
    for job in (crashed, stopped, limited):
        job.lay_caretaker(*SAFE)
    limited.awaits_told("began 1")
    began_s = time.monotonic()
    with stopped_slurmctld(cluster):
        crashed.kill_process()
        stopped.stop_first_task()
        wait_for(lambda: "saved 0" in limited.told, 60 * TIME_LIMIT_MIN, limited.events)
        time.sleep(max(0.0, began_s + AFTER_LIMIT_S - time.monotonic()))
    for job in (limited, crashed, stopped):
        wait_for(lambda job=job: "began 2" in job.told, 120, job.events)  # type: ignore[misc]
    for job in (limited, crashed, stopped):
        cluster.slurm("scancel", job.newest_id())


def test_a_job_whose_srun_hangs_while_its_process_dies_is_started_again(
    job: SupervisedJob,
) -> None:
    job.submit("steady", *SAFE)
    job.awaits_told("began 1")
    hung = [process for process in find_processes(job.files.launch) if process.name() == "srun"]
    assert hung
    for process in hung:
        os.kill(process.pid, signal.SIGSTOP)
    job.kill_process()
    job.awaits(lambda: "began 2" in job.told)
    assert job.restarts() == 1
    job.cluster.slurm("scancel", job.job_id)


def test_a_job_runs_on_through_maintenance_and_is_requeued_to_another_node(
    job: SupervisedJob,
) -> None:
    cluster = job.cluster
    job.submit("steady", *SAFE)
    job.awaits_told("began 1")
    node = job.nodes()
    reservation = ("ReservationName=works", f"Nodes={node}", "Users=root", "StartTime=now")
    flags = ("Duration=60", "Flags=maint,ignore_jobs")
    partition = ("scontrol", "update", "PartitionName=priority")
    try:
        cluster.slurm("scontrol", "reconfigure")
        cluster.slurm(*partition, "State=DOWN")
        cluster.slurm("scontrol", "create", *reservation, *flags)
        drained = (f"NodeName={node}", "State=DRAIN", "Reason=test")
        cluster.slurm("scontrol", "update", *drained)
        cluster.slurm("scontrol", "reconfigure")
        wait_for(lambda: cluster.node_state(node).startswith(("drain", "maint")))
        assert job.state() == "RUNNING"
        cluster.slurm(*partition, "State=UP")
        cluster.slurm("scontrol", "requeue", job.job_id)
        job.awaits_told("began 1", "saved 0", "began 2")
        assert job.nodes() != node
    finally:
        cluster.slurm(*partition, "State=UP")
        cluster.slurm("scontrol", "delete", "ReservationName=works")
        cluster.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
    cluster.slurm("scancel", job.job_id)


def test_a_node_whose_epilog_fails_is_left_for_another(job: SupervisedJob) -> None:
    cluster = job.cluster
    script = cluster.state_dir / "epilog"
    write_program(script, f"[ ! -e {script}.fails ]")
    conf = cluster.state_dir / "etc" / "slurm.conf"
    before = conf.read_text()
    try:
        conf.write_text(f"{before}Epilog={script}\n")
        cluster.slurm("scontrol", "reconfigure")
        job.submit("steady", *SAFE)
        job.awaits_told("began 1")
        node = job.nodes()
        Path(f"{script}.fails").touch()
        cluster.slurm("scancel", "--signal=TERM", job.job_id)
        wait_for(lambda: cluster.node_state(node) == "drained", scaled(60), every_s=SLURM_POLL_S)
        job.awaits_told("began 1", "saved 0", "began 2")
        assert job.nodes() != node
    finally:
        Path(f"{script}.fails").unlink(missing_ok=True)
        # before the reconfiguration, in which Slurm 24.11 may forget that the node was drained
        cluster.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")
        conf.write_text(before)
        cluster.slurm("scontrol", "reconfigure")
    cluster.slurm("scancel", job.job_id)


def test_a_time_limit_that_an_administrator_shortens_is_met_with_another_start(
    job: SupervisedJob,
) -> None:
    job.submit("steady", *SAFE, "--time=30")
    job.lay_caretaker(*SAFE)
    job.awaits_told("began 1")
    job.cluster.slurm("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=1")
    wait_for(lambda: "began 2" in job.told, 180, job.shown, every_s=SLURM_POLL_S)
    assert job.told == ["began 1", "saved 0", "began 2"]
    job.cluster.slurm("scancel", job.newest_id())

"""status, why, logs, cancel and list on real jobs: waiting, working, failed, lost, in silence."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths
from tests.slurm.supervised_jobs import OperatedRun
from tests.support.commands import areal_hpc, said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import (
    HELD,
    Devcluster,
    devcluster,
    stopped_slurmctld,
)
from tests.support.small_run import processes_of
from tests.support.waiting import wait_for


@pytest.fixture
def run(cluster: Devcluster, tmp_path: Path) -> OperatedRun:
    return OperatedRun.make(cluster, tmp_path, "one")


def test_a_run_that_waits_says_what_for(run: OperatedRun) -> None:
    trainer = run.submit("trainer", "steady", "--hold")
    cell = run.submit("cell-0", "steady", f"--dependency=after:{trainer.job_id}")
    status = run.command("status")
    assert "quickstart/one: waiting" in status
    assert f"trainer  {trainer.job_id}" in status
    assert "PENDING (JobHeldUser)" in status
    assert "cell-0 is pending: a job that it depends on has not ended yet" in status
    why = run.command("why", code=1)
    assert why.startswith(f"trainer (job {trainer.job_id}) is pending: its user holds it")
    assert f"try: scontrol release {trainer.job_id}" in why
    output = run.command("cancel")
    assert "cancelled 2 jobs; none are left" in output
    assert run.cluster.slurm("squeue", "-h") == ""
    assert cell.state() == "CANCELLED"
    assert "the run was cancelled" in run.command("why")


def test_a_running_run_is_followed_and_cancelled_with_a_last_checkpoint(run: OperatedRun) -> None:
    trainer, cell = run.submit("trainer", "steady"), run.submit("cell-0", "deaf")
    trainer.awaits_words(1)
    cell.awaits_words(1)
    status = run.command("status")
    assert "quickstart/one: running" in status
    assert "RUNNING" in status
    assert "step              0 of 25" in status
    assert "nothing has failed" in run.command("why")
    assert "quickstart/one  running" in run.command("list")
    follower = run.start("logs", "-f", "cell-0")
    assert follower.stdout is not None
    assert "cell-0/cell@n0" in follower.stdout.readline()
    with stopped_slurmctld(run.cluster):
        cancelling = run.start("cancel")
        status = run.command("status")
        assert "? (Slurm does not answer)" in status
        assert "Slurm does not answer (" in status
        assert cancelling.stdout is not None
        assert "slurmctld has not responded for" in cancelling.stdout.readline()
    output, _ = cancelling.communicate(timeout=scaled(90))
    assert cancelling.returncode == 0
    assert "SIGTERM to 2 jobs" in output
    assert run.cluster.slurm("squeue", "-h") == ""
    assert trainer.words[1:] == ["saved 0"]
    assert trainer.outcome().exit_code == 143
    assert run.paths.cancelled_marker.exists()
    assert trainer.state() in {"CANCELLED", "FAILED"}
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=scaled(60))
    assert follower.returncode == 0
    wait_for(lambda: processes_of(run.paths.root) == [])


def test_an_interrupted_cancellation_names_the_jobs_that_stay(run: OperatedRun) -> None:
    trainer = run.submit("trainer", "deaf")
    trainer.awaits_words(1)
    cancelling = run.start("cancel")
    assert cancelling.stdout is not None
    assert "SIGTERM to 1 jobs" in cancelling.stdout.readline()
    cancelling.send_signal(signal.SIGINT)
    output, _ = cancelling.communicate(timeout=scaled(60))
    assert cancelling.returncode == 130
    assert f"that Slurm listed last: {trainer.job_id}\n" in output
    assert f" cancel {run.paths.root}\n" in output
    assert "Traceback" not in output
    run.cluster.slurm("scancel", trainer.job_id)


def test_the_first_traceback_across_ranks_is_named(run: OperatedRun) -> None:
    run.submit("trainer", "failing", tasks=2).awaits_state("FAILED")
    why = run.command("why", code=1)
    assert "raised ValueError: the loss is not a number" in why.splitlines()[0]
    assert "trainer/trainer-1@n0" in why.splitlines()[0]
    assert 'raise ValueError("the loss is not a number")' in why
    assert "trainer of trainer ended: exit code 1" in why
    assert "FAILED (exit code 1)" in run.command("status")
    assert "ValueError" in run.command("logs", "trainer")


def test_memory_that_ran_out_is_named_whoever_died_of_it(run: OperatedRun) -> None:
    run.submit("cell-0", "hungry").awaits_state("FAILED", "OUT_OF_MEMORY")
    why = run.command("why", code=1)
    assert "memory" in why.splitlines()[0]
    assert "ended: killed by SIGKILL, which usually means out of memory" in why
    assert "try: request more memory" in why


def test_a_lost_node_is_named_and_its_job_requeued_elsewhere(run: OperatedRun) -> None:
    cluster = run.cluster
    counts_its_starts = "echo start ${SLURM_RESTART_COUNT:-0}; echo on $(hostname); srun sleep 600"
    moving = cluster.submit(counts_its_starts)
    lost = cluster.await_output(moving, 2)[1].removeprefix("on ")
    trainer = run.submit("trainer", "steady", "--no-requeue", f"--nodelist={lost}")
    trainer.awaits_words(1)
    cluster.done("kill-node", lost)
    trainer.awaits_state("NODE_FAIL")
    assert cluster.node_state(lost) == "down"
    shown = cluster.command("status")
    assert shown.returncode == 1
    assert f"{lost}        down*        without power" in shown.stdout
    assert "NODE_FAIL" in run.command("status")
    why = run.command("why", code=1)
    assert f"trainer (job {trainer.job_id}) on {lost} lost a node" in why.splitlines()[0]
    first, on, second, elsewhere = cluster.await_output(moving, 4)
    assert (first, on, second) == ("start 0", f"on {lost}", "start 1")
    assert elsewhere != on
    cluster.done("restore-node", lost)
    assert cluster.node_state(lost) == "idle"
    cluster.done("status")


def test_doctor_asks_a_node_about_the_file_root(cluster: Devcluster, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(f"fileroot: {tmp_path}/runs\nslurm: {{partition: scavenger}}\n")
    doctor = ("doctor", "--site", site)
    output = said_by(areal_hpc(*doctor, "--check-node", environ=cluster.environ))
    assert re.search(r"ok +partition scavenger", output)
    assert "n01 saw the file, and its answer is visible here" in output
    assert list((tmp_path / "runs").iterdir()) == []
    site.write_text("slurm: {partition: nowhere}\n")
    refused = areal_hpc(*doctor, environ=cluster.environ)
    assert refused.returncode == 1
    assert re.search(r"fail +partition nowhere +Slurm does not know it", refused.stdout)
    assert "sbatch rejects the job" in refused.stdout


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "state", "--nodes=1", "--no-accounting") as cluster:
        yield cluster


def tear_files(paths: RunPaths) -> None:
    """Leave a full disk's torn line in every JSON-lines file, and a line joined to a fragment."""
    index = paths.shard_index_dir / "cell-0.jsonl"
    files = [paths.submissions, paths.excluded_nodes, paths.events, paths.metrics]
    files += [paths.drops, paths.curriculum_draws, paths.sft_metrics, index]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(b'{"node":"n0{"node":"n03","reason":"no GPU"}\n{"job":"cell-0","jo')


def test_commands_work_without_accounting_and_torn_lines(bare: Devcluster, tmp_path: Path) -> None:
    run = OperatedRun.make(bare, tmp_path, "one")
    trainer = run.submit("trainer", "steady", "--partition=scavenger", "--requeue")
    tear_files(run.paths)
    trainer.awaits_words(1)
    status = run.command("status")
    assert f"trainer  {trainer.job_id}" in status
    assert "RUNNING" in status
    assert f"{run.paths.submissions} line 2 cannot be read and is left out" in status
    assert "nothing has failed" in run.command("why")
    run.command("audit")
    # Preempted, the job itself reads the list of excluded nodes and has Slurm requeue it.
    bare.submit("sleep 1", "--partition=priority", "--exclusive", "--mem=100")
    # On a slow machine its grace is over before it has saved.
    trainer.awaits(lambda: trainer.words[-1].startswith("began 2"))
    status = run.command("status")
    assert f"trainer  {trainer.job_id}" in status
    assert "restart 1" in status
    assert "preempted by a job of higher priority" in run.command("why")
    run.submit("cell-1", "steady", "--begin=now+1hour")
    run.submit("cell-0", "hungry").awaits_state("FAILED", "OUT_OF_MEMORY")
    status = run.command("status")
    assert "PENDING (BeginTime)" in status
    assert "FAILED" in status or "OUT_OF_MEMORY" in status
    assert "after this: cell-0 ran out of memory" in run.command("why", code=1)
    assert "quickstart/one  running" in run.command("list")
    assert "SIGTERM to 1 job" in run.command("cancel")
    assert bare.slurm("squeue", "-h") == ""
    assert "quickstart/one  cancelled" in run.command("list")
    output = run.command("resume", *HELD)
    assert "job      sft" in output
    assert "job      trainer" in output
    assert len(bare.slurm("squeue", "-h").splitlines()) == 4
    assert "quickstart/one: waiting" in run.command("status")
    run.submit("cell-2", "steady").awaits_words(1)
    assert "cancelled 5 jobs" in run.command("cancel", "--now"), "the new lines count"
    assert bare.slurm("squeue", "-h") == ""
    assert b'"jo\n' in run.paths.submissions.read_bytes()

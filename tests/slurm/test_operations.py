"""status, why, logs, cancel and list on real jobs: waiting, working, failed, lost, in silence."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.slurm.operated import OperatedRun
from tests.support.devclusters import Devcluster, devcluster
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

TASK_SETS = ("train_dataset", "valid_dataset")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    place = tmp_path_factory.mktemp("cluster") / "state"
    with devcluster(place, "--nodes=2", "--grace-s=3") as found:
        yield found


@pytest.fixture
def run(shared: Devcluster, tmp_path: Path) -> Iterator[OperatedRun]:
    """A run without jobs; what the test gave it is cancelled afterwards."""
    yield OperatedRun.make(shared, tmp_path, "one")
    shared.cancel_all()
    shared.done("up")


def processes_of(run: OperatedRun) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any(str(run.paths.root) in word for word in words) and process.pid != os.getpid():
            found.append(" ".join(words))
    return found


def test_a_run_that_waits_says_what_for(run: OperatedRun) -> None:
    trainer = run.submit("trainer", "checkpoints", "--hold")
    cell = run.submit("cell-0", "checkpoints", f"--dependency=after:{trainer}")
    status = run.command("status")
    assert "quickstart/one: waiting" in status
    assert f"trainer  {trainer}" in status
    assert "PENDING (JobHeldUser)" in status
    assert "cell-0 is pending: a job that it depends on has not ended yet" in status
    why = run.command("why", code=1)
    assert why.startswith(f"trainer (job {trainer}) is pending: its user holds it")
    assert f"try: scontrol release {trainer}" in why
    said = run.command("cancel")
    assert "cancelled 2 jobs; none are left" in said
    assert run.cluster.slurm("squeue", "-h") == ""
    assert run.cluster.job_state(cell) == "CANCELLED"
    assert "the run was cancelled" in run.command("why")


def test_a_run_at_work_is_followed_and_cancelled_with_a_last_checkpoint(run: OperatedRun) -> None:
    trainer = run.submit("trainer", "checkpoints")
    run.submit("cell-0", "ignores")
    wait_for(lambda: "works" in run.log("trainer") and "works" in run.log("cell-0"), 60)
    status = run.command("status")
    assert "quickstart/one: running" in status
    assert "RUNNING" in status
    assert "step              0 of 25" in status
    assert "nothing has failed" in run.command("why")
    follower = run.start("logs", "-f", "cell-0")
    assert follower.stdout is not None
    assert "cell-0/cell@n0" in follower.stdout.readline()
    said = run.command("cancel")
    assert "SIGTERM to 2 jobs" in said
    assert run.cluster.slurm("squeue", "-h") == ""
    assert "saved" in run.log("trainer")
    outcome = json.loads((run.paths.jobs_dir / "trainer" / "task_exit.0.json").read_text())
    assert outcome["exit_code"] == 143
    assert run.paths.cancelled_marker.exists()
    assert run.cluster.job_state(trainer) in {"CANCELLED", "FAILED"}
    follower.send_signal(signal.SIGINT)
    follower.communicate(timeout=60)
    assert follower.returncode == 0
    wait_for(lambda: processes_of(run) == [], 60)


def test_the_first_traceback_across_ranks_is_named(run: OperatedRun) -> None:
    trainer = run.submit("trainer", "raises", tasks=2)
    wait_for(lambda: run.cluster.job_state(trainer) == "FAILED", 60)
    why = run.command("why", code=1)
    assert "raised ValueError: the loss is not a number" in why.splitlines()[0]
    assert "trainer/trainer-1@n0" in why.splitlines()[0]
    assert 'raise ValueError("the loss is not a number")' in why
    assert "trainer of trainer ended: exit code 1" in why
    assert "FAILED (exit code 1)" in run.command("status")
    assert "ValueError" in run.command("logs", "trainer")


def test_memory_that_ran_out_is_named_whoever_died_of_it(run: OperatedRun) -> None:
    cell = run.submit("cell-0", "grows")
    wait_for(lambda: run.cluster.job_state(cell) in {"FAILED", "OUT_OF_MEMORY"}, 60)
    why = run.command("why", code=1)
    assert "memory" in why.splitlines()[0]
    assert "ended: killed by SIGKILL, which usually means out of memory" in why
    assert "try: request more memory" in why


def test_a_lost_node_is_named(run: OperatedRun) -> None:
    trainer = run.submit("trainer", "checkpoints", "--no-requeue", "--nodelist=n02")
    wait_for(lambda: "works" in run.log("trainer"), 60)
    run.cluster.done("kill-node", "n02")
    wait_for(lambda: run.cluster.job_state(trainer) == "NODE_FAIL", 60)
    assert "NODE_FAIL" in run.command("status")
    why = run.command("why", code=1)
    assert f"trainer (job {trainer}) on n02 lost a node" in why.splitlines()[0]
    run.cluster.done("restore-node", "n02")


def test_a_controller_that_is_silent_is_waited_for(run: OperatedRun) -> None:
    run.submit("trainer", "checkpoints")
    wait_for(lambda: "works" in run.log("trainer"), 60)
    controller = int((run.cluster.state_dir / "run" / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        cancelling = run.start("cancel")
        status = run.command("status")
        assert "? (Slurm does not answer)" in status
        assert "Slurm has not responded for" in status
        assert cancelling.stdout is not None
        assert "slurmctld has not responded for" in cancelling.stdout.readline()
    finally:
        os.kill(controller, signal.SIGCONT)
    cancelling.communicate(timeout=90)
    assert cancelling.returncode == 0
    assert run.cluster.slurm("squeue", "-h") == ""
    assert "saved" in run.log("trainer")


def tear(run: OperatedRun) -> list[Path]:
    """Leave in every JSON-lines file what a full disk leaves, and a line joined to a fragment."""
    paths = run.paths
    index = paths.index_dir / "cell-0.jsonl"
    files = [paths.submissions, paths.excluded_nodes, paths.events, paths.metrics]
    files += [paths.drops, paths.curriculum, paths.sft_metrics, index]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(b'{"node":"n0{"node":"n03","reason":"no GPU"}\n{"job":"cell-0","jo')
    return files


def test_a_torn_line_ends_no_command_and_no_requeue(shared: Devcluster, tmp_path: Path) -> None:
    sizes = [f"{part}.kwargs.size=64" for part in (*TASK_SETS, "sft.dataset")]
    run = OperatedRun.make(shared, tmp_path, "torn", *sizes)
    trainer = run.submit(
        "trainer", "checkpoints", "--partition=scavenger", "--requeue", "--nodelist=n01"
    )
    torn = tear(run)
    wait_for(lambda: "works" in run.log("trainer"), 60)
    status = run.command("status")
    assert f"trainer  {trainer}" in status
    assert "RUNNING" in status
    assert f"{run.paths.submissions} line 2 cannot be read and is left out" in status
    assert "nothing has failed" in run.command("why")
    assert "quickstart/torn  running" in run.command("list")
    run.command("audit")
    # Preempted, the job itself reads the list of excluded nodes and has Slurm requeue it.
    priority = ("--partition=priority", "--exclusive", "--mem=100", "--nodelist=n01")
    run.cluster.submit("sleep 1", *priority)
    wait_for(lambda: run.log("trainer").count("works") == 2, 90)
    assert "SIGTERM to 1 job" in run.command("cancel")
    held = ("cluster.slurm.sbatch_flags=[--hold]", "cluster.slurm.mem=100M")
    assert "job      trainer" in run.command("resume", *held)
    jobs = len(run.cluster.slurm("squeue", "-h").splitlines())
    assert f"cancelled {jobs} jobs" in run.command("cancel", "--now"), "the new lines count"
    assert all(b'"jo\n' in path.read_bytes() for path in torn if path == run.paths.submissions)


def areal_hpc(cluster: Devcluster, *arguments: str, code: int = 0) -> str:
    """What a command that is given no run prints."""
    asked = subprocess.run(
        (sys.executable, "-m", "areal_hpc", *arguments),
        cwd=CHECKOUT,
        env=cluster.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert asked.returncode == code, asked.stdout + asked.stderr
    return asked.stdout


def test_a_cancelled_run_is_submitted_again_from_its_directory(
    shared: Devcluster, tmp_path: Path
) -> None:
    sizes = [f"{part}.kwargs.size=64" for part in TASK_SETS]
    keys = ["cluster.slurm.sbatch_flags=[--hold]", "cluster.slurm.mem=100M", *sizes]
    keys += [f"cluster.fileroot={tmp_path}", "sft.dataset.kwargs.size=64"]
    areal_hpc(shared, "submit", "recipes/quickstart.yaml", *keys)
    run = str(tmp_path / "quickstart" / "demo")
    first = set(shared.slurm("squeue", "-h", "-o", "%i").split())
    assert len(first) == 3, "the SFT stage, the trainer, a cell"
    areal_hpc(shared, "cancel", run)
    said = areal_hpc(shared, "resume", run, "trainer.total_steps=7")
    assert "changed  trainer.total_steps: 25 -> 7" in said
    second = set(shared.slurm("squeue", "-h", "-o", "%i").split())
    assert len(second) == 3
    assert second.isdisjoint(first)
    status = areal_hpc(shared, "status", run)
    assert "quickstart/demo: waiting" in status
    assert "step              0 of 7" in status
    shared.cancel_all()


def test_doctor_asks_a_compute_node_whether_the_file_root_is_shared(
    shared: Devcluster, tmp_path: Path
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(f"fileroot: {tmp_path}/runs\nslurm: {{partition: scavenger}}\n")
    said = areal_hpc(shared, "doctor", "--site", str(site), "--check-node")
    assert "ok    partition scavenger" in said
    assert "n01 saw the file, and its answer is visible here" in said
    assert list((tmp_path / "runs").iterdir()) == []
    site.write_text("slurm: {partition: nowhere}\n")
    refused = areal_hpc(shared, "doctor", "--site", str(site), code=1)
    assert "fail  partition nowhere  Slurm does not know it" in refused
    assert "sbatch rejects the job" in refused


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    """A cluster without accounting."""
    place = tmp_path_factory.mktemp("bare") / "state"
    with devcluster(place, "--nodes=1", "--no-accounting", "--grace-s=15") as found:
        yield found


def test_all_of_it_works_without_accounting(bare: Devcluster, tmp_path: Path) -> None:
    run = OperatedRun.make(bare, tmp_path, "one")
    grown = run.submit("cell-0", "grows")
    run.submit("trainer", "checkpoints")
    run.submit("cell-1", "checkpoints", "--begin=now+1hour")
    wait_for(lambda: bare.job_state(grown) in {"FAILED", "OUT_OF_MEMORY"}, 60)
    wait_for(lambda: "works" in run.log("trainer"), 60)
    status = run.command("status")
    assert "PENDING (BeginTime)" in status
    assert "FAILED" in status or "OUT_OF_MEMORY" in status
    assert "ran out of memory" in run.command("why")
    assert "quickstart/one  running" in run.command("list")
    run.command("cancel", "--now")
    assert bare.slurm("squeue", "-h") == ""
    assert "quickstart/one  cancelled" in run.command("list")


def test_a_preempted_run_goes_on_and_is_resumed_without_accounting(
    bare: Devcluster, tmp_path: Path
) -> None:
    sizes = [f"{part}.kwargs.size=64" for part in (*TASK_SETS, "sft.dataset")]
    run = OperatedRun.make(bare, tmp_path, "two", *sizes)
    trainer = run.submit("trainer", "checkpoints", "--partition=scavenger", "--requeue")
    wait_for(lambda: "works" in run.log("trainer"), 60)
    bare.submit("sleep 1", "--partition=priority", "--exclusive", "--mem=100")
    wait_for(lambda: run.log("trainer").count("works") == 2, 90)
    assert "saved" in run.log("trainer")
    status = run.command("status")
    assert f"trainer  {trainer}" in status
    assert "restart 1" in status
    assert "preempted by a job of higher priority" in run.command("why")
    run.command("cancel")
    said = run.command("resume", "cluster.slurm.sbatch_flags=[--hold]", "cluster.slurm.mem=100M")
    assert "job      sft" in said
    assert len(bare.slurm("squeue", "-h").splitlines()) == 3
    assert "quickstart/two: waiting" in run.command("status")
    run.command("cancel", "--now")
    assert bare.slurm("squeue", "-h") == ""

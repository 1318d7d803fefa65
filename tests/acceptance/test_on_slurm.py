"""Runs on several nodes, in containers, in held allocations and by fifty submissions of Slurm.

Writes `benchmarks/results/submissions.json` and its table of `docs/survival.md`.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.rundir.jobs import read_submissions
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.sandbox.runtimes import find_installed_runtimes
from areal_hpc.view.evaluation_report import read_report
from tests.support.commands import areal_hpc, audit_of, run_program, said_by
from tests.support.deadlines import scaled
from tests.support.devclusters import (
    CUT_DOWN,
    HELD,
    JOBS,
    SLURM_POLL_S,
    Devcluster,
    Submitting,
    devcluster,
    light_overrides,
    numbers,
    queued,
    recorded,
    stopped_slurmctld,
)
from tests.support.environments import CHECKOUT, python_of
from tests.support.held_run import NO_END, ONE_NODE, TWO_NODES, HeldRun
from tests.support.light_run import SIZES
from tests.support.process_commands import find_processes, is_scheduler
from tests.support.results import write_results
from tests.support.run_files import events_of
from tests.support.small_run import LIGHT
from tests.support.sums import tasks
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(1500)

START_S = 300.0
"""A server's start, beside other work."""
SPANNING = (
    "inference.cells=1",
    "inference.tp=2",
    "inference.nodes_per_replica=2",
    "trainer.parallel.dp=1",
    "trainer.total_steps=8",
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Devcluster]:
    with devcluster(tmp_path / "cluster", "--nodes=4") as cluster:
        yield cluster
        cluster.cancel_all()


def second_scheduler(run: Submitting) -> psutil.Process:
    """SGLang's scheduler on the cell's second node, a descendant of the follower there."""
    (follower,) = find_processes(run.paths.jobs_dir / "cell-0" / "follower-1.json")
    (scheduler,) = filter(is_scheduler, follower.children(recursive=True))
    return scheduler


def test_a_run_goes_on_when_one_node_loses_its_part(
    cluster: Devcluster, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = Submitting(cluster, tmp_path / "runs")
    waiting = run.start("--wait", *SPANNING)
    request.addfinalizer(waiting.kill)  # where the test failed it would wait for good
    wait_for(lambda: len(events_of(run.paths, "weights_published")) >= 3, START_S)
    struck_at = time.time()
    second_scheduler(run).kill()
    wait_for(lambda: len(events_of(run.paths, "replica_ready")) == 2, START_S)
    (died,) = events_of(run.paths, "replica_died")
    assert died["time"] - struck_at < 30, died
    output, _ = waiting.communicate(timeout=600)
    assert waiting.returncode == 0, output
    assert "step      8/8" in output
    updates = events_of(run.paths, "weights_published")
    assert all(update["replicas"] == 1 and not update["failed"] for update in updates)
    logs = run.paths.logs_dir / "latest" / "cell-0" / "restart_00"
    parts = {f"replica-0.{start}{part}.log" for start in (1, 2) for part in ("", "-node-1")}
    assert {path.name for path in logs.glob("replica-*.log")} == parts
    heads = [(logs / f"{name}.log").read_text().split()[1] for name in ("driver-0", "follower-1")]
    assert heads[0] != heads[1], "on one node"
    assert "trained_once=32 duplicates=0 lost=0" in audit_of(run.paths.root, cluster.environ)


RUN_TIMEOUT_S = 1200.0
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "home", "run", "opt")


def make_image(folder: Path) -> Path:
    """A folder as an image: empty but for the links of this machine's root, which mounts fill."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for link in filter(Path.is_symlink, Path("/").iterdir()):
        (folder / link.name).symlink_to(link.readlink())
    return folder


def test_a_run_in_a_container_trains_and_every_process_of_it_is_inside(tmp_path: Path) -> None:
    assert "apptainer" in find_installed_runtimes(), "make slurm-roots unpacks it"
    image = make_image(tmp_path / "image")
    environments = (CHECKOUT / ".venvs").resolve()
    mounts = ["/usr:/usr:ro", "/etc:/etc:ro", f"{environments}:{environments}:ro"]
    container = f"{{kind: apptainer, train: {image}, serve: {image}, mounts: {mounts}}}"
    pythons = [f"cluster.{role}.python={python_of('main')}" for role in ("train", "agents")]
    with devcluster(tmp_path / "state", "--nodes=2") as cluster:
        run = Submitting(cluster, tmp_path / "runs")
        said_by(
            run.submit(
                f"cluster.slurm.container={container}",
                *pythons,
                f"cluster.serve.python={python_of('serve')}",
                # As a user does: root would ask for rights that this machine's root may lack.
                "cluster.slurm.setup=[export OMP_NUM_THREADS=1 APPTAINER_USERNS=1]",
                "inference.cells=1",
                "trainer.parallel.dp=1",
                "--wait",
                timeout_s=RUN_TIMEOUT_S,
            )
        )
        assert "duplicates=0 lost=0 " in audit_of(run.paths.root, cluster.environ)
    steps = [row["step"] for row in read_readable_records(run.paths.metrics)]
    assert steps[-1] == 5
    script = run.paths.job("trainer").script.read_text()
    assert "apptainer exec" in script


TIMEOUT_S = 900.0


@pytest.mark.timeout(1200)
def test_a_node_is_examined_by_a_step_that_leaves_nothing(
    cluster: Devcluster, tmp_path: Path
) -> None:
    scratch, evidence = tmp_path / "scratch", tmp_path / "doctor.json"
    scratch.mkdir()
    ended = run_program(
        *("srun", "--partition=scavenger", "--nodelist=n02", "--exclusive", "--cpu-bind=none"),
        *(sys.executable, "-m", "areal_hpc", "doctor", "--gpu", "--device", "cpu"),
        *("--json", evidence),
        environ={**cluster.environ, "TMPDIR": str(scratch)},
        timeout_s=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdicts = {row["name"]: row["verdict"] for row in json.loads(evidence.read_text())["results"]}
    steps = ("isolation", "all-reduce", "tiny run")
    assert verdicts["rehearsal"] == "warn"
    assert [verdicts[name] for name in steps] == ["ok"] * len(steps), ended.stdout
    assert "2 ranks over gloo" in ended.stdout
    assert "2 steps with updates between them" in ended.stdout
    assert not list(scratch.glob("areal-hpc-doctor-*"))
    assert cluster.slurm("squeue", "--noheader") == ""


TASKS = 6


@pytest.mark.timeout(400)
def test_an_evaluation_is_one_job_and_the_same_command_has_its_results(
    cluster: Devcluster, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    texts = [task["messages"][0]["content"] for task in tasks(200, 1, 5)]
    make_tiny_model(model, texts, seed=1, vocab=384, **SIZES)
    paths = RunPaths(tmp_path / "runs" / "quickstart" / "eval-model")
    command = (
        *("eval", model, "--recipe", "recipes/quickstart_slurm.yaml", "--set", "valid"),
        *("--submit", *CUT_DOWN, *LIGHT, f"cluster.fileroot={tmp_path / 'runs'}"),
        *(f"evaluation.tasks={TASKS}", "evaluation.n_samples=2"),
    )
    output = said_by(areal_hpc(*command, "--wait", environ=cluster.environ, timeout_s=300))
    job, caretaker = read_submissions(paths.submissions)
    assert (job.job, caretaker.job) == ("evaluation", "caretaker")
    assert "avg@2" in output
    wait_for(lambda: cluster.job_state(job.job_id) in ("COMPLETED", ""), 60, every_s=SLURM_POLL_S)
    samples = read_report(paths.root).sets["valid"].samples
    assert [len(group) for group in samples] == [2] * TASKS
    again = said_by(areal_hpc(*command, environ=cluster.environ))
    assert again.startswith("set ")
    assert len(read_submissions(paths.submissions)) == 2
    resumed = areal_hpc("resume", paths.root, environ=cluster.environ)
    assert resumed.returncode == 78
    assert "repeat the areal-hpc eval command" in resumed.stderr


@pytest.mark.timeout(1500)
def test_steps_that_die_a_time_limit_and_ctrl_c_cost_no_ticket(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs")
    with run.hold(*ONE_NODE, f"trainer.total_steps={NO_END}"):
        run.await_training(1)
        gpus = {job: run.get_gpus(job) for job in ("trainer", "cell-0")}
        assert sorted(gpus.values()) == ["0", "1"]  # which step has which is up to Slurm
        for supervisor in run.find_supervisors("cell-0"):
            supervisor.kill()
        run.await_step("cell-0.2")
        assert run.get_gpus("cell-0") == gpus["cell-0"]
        run.await_training(len(run.read_steps()) + 2)
        run.press_ctrl_c()
    run.await_nothing_left()
    with run.hold(*TWO_NODES, f"trainer.total_steps={NO_END}"):
        run.await_training(len(run.read_steps()) + 1)
        note = run.read_note()
        nodes = {step.job: step.nodes for step in note.steps}
        assert nodes == {"trainer": ("n01",), "cell-0": ("n02",)}
        status = areal_hpc("status", run.paths.root, environ=cluster.environ)
        assert f"running in allocation {note.job_id}" in status.stdout
        run.shorten_time_limit()
        assert run.wait(100) == 75, run.said()
    assert f"error: allocation {note.job_id} is close to its time limit" in run.said()
    run.await_nothing_left()
    assert f"the run was stopped: allocation {note.job_id} is close to its time" in run.why()
    last, saved = run.read_steps()[-1], find_latest_checkpoint(run.paths.checkpoints_dir)
    assert saved is not None
    assert saved.state.step == last  # no step is taken twice
    with run.hold(*TWO_NODES, f"trainer.total_steps={last + 20}"):
        run.await_training(len(run.read_steps()) + 1)
        run.cancel_step("trainer.3")
        assert run.wait(300) == 0, run.said()
    for job in ("cell-0", "trainer"):
        assert f"{job} ended without an exit status; this job is started again" in run.said()
    assert f"trained_once={4 * (last + 20)} duplicates=0 lost=0" in audit_of(run.paths.root)
    run.await_nothing_left()


def test_an_allocation_that_is_cancelled_leaves_nothing_and_why_names_it(
    cluster: Devcluster, tmp_path: Path
) -> None:
    run = HeldRun(cluster, tmp_path / "runs", f"sft.total_steps={NO_END}")
    with run.hold(*ONE_NODE):
        run.await_step("sft.1")
        cluster.slurm("scancel", run.read_note().job_id)
        assert run.wait(60) != 0, run.said()
    run.await_nothing_left()
    why = run.why()
    assert "the run was stopped" in why
    assert "was ended (Slurm says" in why or "stopped by SIG" in why


SUBMISSIONS = 50
MAX_DELAY_S, MAX_STOP_S = 6.0, 15.0
"""A submission takes six seconds, most of them before the first job; sbatch waits for an answer for
ten."""


def await_random_moment(
    chance: random.Random, run: Submitting, recorded_before: int, submitting: subprocess.Popen[str]
) -> None:
    """Return some time after the start, or when slurmctld is about to be asked for a job.

    What it is asked for takes a tenth of a second, which a random time alone would seldom meet.
    """
    jobs = chance.randint(0, len(JOBS))  # after the last one they are released
    if jobs == 0:
        time.sleep(chance.uniform(0.0, MAX_DELAY_S))
        return
    wait_for(
        lambda: len(run.submissions) >= recorded_before + jobs or submitting.poll() is not None,
        every_s=0.005,
    )


@pytest.mark.timeout(5400)
def test_no_submission_leaves_an_orphan(cluster: Devcluster, tmp_path: Path) -> None:
    chance = random.Random(2211)
    run = Submitting(cluster, tmp_path / "runs")
    light = light_overrides(tmp_path)
    rows = []
    for attempt in range(SUBMISSIONS):
        began, before = time.monotonic(), len(run.submissions)
        submitting = run.start(*HELD, *light)
        await_random_moment(chance, run, before, submitting)
        with stopped_slurmctld(cluster):
            time.sleep(chance.uniform(0.0, MAX_STOP_S))
        shown, _ = submitting.communicate(timeout=scaled(300))
        took_s = time.monotonic() - began
        repeated = submitting.returncode == 75
        if repeated:  # slurmctld was silent before anything was submitted
            assert numbers(cluster) == [], shown
            said_by(run.submit(*HELD, *light))
        else:
            assert submitting.returncode == 0, shown
        assert queued(cluster) == JOBS, shown
        orphans = set(numbers(cluster)) - set(recorded(run).values())
        rows.append(
            {
                "attempt": attempt,
                "seconds": round(took_s, 1),
                "adopted": shown.count("was accepted nevertheless"),
                "tried_again": shown.count("looking for the job"),
                "repeated": int(repeated),
                "orphans": len(orphans),
            }
        )
        write_results("submissions", rows)
        said_by(run.call("cancel", str(run.paths.root), "--now"))
        assert numbers(cluster) == []
    assert sum(row["orphans"] for row in rows) == 0
    assert sum(row["tried_again"] for row in rows) > 0

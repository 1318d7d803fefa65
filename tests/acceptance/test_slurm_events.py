"""Preemptions, losses, limits and cancellations of Slurm on runs with the real trainer and SGLang.

Four runs on five nodes, of which a run needs four: the shipped recipe learns although it is
preempted twice; one run has all events of its trainer, one all events of its cells, the last an
evaluation job. After every event the audit must find no ticket lost and none trained twice. Writes
`benchmarks/results/slurm_events.json`, which `docs/survival.md` shows.
"""

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.slurm_run import Sighting, SlurmRun
from tests.support.devclusters import TESTED_RELEASE, Devcluster, devcluster
from tests.support.results import read_results, write_results

pytestmark = pytest.mark.timeout(5400)

COMMIT_EVERY_STEPS = 5
GRACE_S = 45
"""Grace time of a preemption: the run's own grace, and its margin, fit into it."""
TIME_LIMIT_MIN = 4
STEPS_LEFT = 3
"""Steps that a resumed run is to take before it has finished."""
AFTER_SIGNAL_S = 2.0
"""Time for which a held rank stays so after all were told to stop."""
TASKS_LEAVE_S = 60.0
LEARNING_TIMEOUT_S = 3600.0
KILLED = 128 + 9
NODES = 5
STOPPING = ("RUNNING", "COMPLETING")
"""States of a job that was struck, before it is in the queue again."""
PREEMPTED_AT = {"cell-1": 5, "trainer": 12}
"""Job, and the step from which on it is preempted."""
RESULTS = f"slurm_events_{TESTED_RELEASE}" if TESTED_RELEASE else "slurm_events"
"""Documents show those of the machine's own Slurm."""
Row = dict[str, Any]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devcluster]:
    state = tmp_path_factory.mktemp("cluster") / "state"
    with devcluster(
        state, f"--nodes={NODES}", f"--grace-s={GRACE_S}", "--timeout-s=100"
    ) as cluster:
        yield cluster


@pytest.fixture
def run(cluster: Devcluster, tmp_path: Path) -> Iterator[SlurmRun]:
    for node in (f"n{number:02}" for number in range(1, NODES + 1)):  # an earlier test's loss
        if cluster.node_state(node) == "down":
            cluster.done("restore-node", node, "--timeout-s=100")
    yield SlurmRun(cluster, tmp_path)
    cluster.cancel_all()


def test_the_quick_start_learns_though_it_is_preempted_twice(run: SlurmRun) -> None:
    began = time.time()
    run.submit_as_shipped()
    for job, step in PREEMPTED_AT.items():
        run.await_true(lambda step=step: run.version.step >= step)  # type: ignore[misc]
        run.preempt(job)
        run.await_true(lambda job=job: run.starts(job) == 2)  # type: ignore[misc]
    run.await_true(run.paths.finished_marker.exists, LEARNING_TIMEOUT_S)
    rewards = [reward for _, reward in run.judged()]
    restarts = {job: run.restarts(job) for job in PREEMPTED_AT}
    took = {"start": rewards[0], "end": rewards[-1], "wall_s": round(time.time() - began)}
    record("learning", took | {"restarts": restarts, "audit": run.audited()})
    assert restarts == dict.fromkeys(PREEMPTED_AT, 1)
    assert rewards[0] <= 0.45
    assert rewards[-1] >= 0.95


def record(part: str, figures: dict[str, Any]) -> None:
    measured = {"learning": {}, "start": {}, "events": {}} | read_results(RESULTS, {})
    measured[part] |= figures
    write_results(RESULTS, measured)


def keep(run: SlurmRun, name: str, sighting: Sighting, figures: Row) -> Row:
    """Record an event: the commands' output in it, its figures, and the present audit."""
    words = {"status": sighting.state, "why": sighting.why}
    row = {**words, **figures, "audit": run.audited()}
    record("events", {name: row})
    return row


def is_away(run: SlurmRun, job: str) -> bool:
    return run.state(job) not in STOPPING


def befalls_trainer(run: SlurmRun, name: str, strike: Callable[[], float]) -> None:
    """Strike the trainer, and see it go on under its number."""
    run.await_steps(COMMIT_EVERY_STEPS + 1)
    run.await_whole(since=time.time())
    job_id, starts, restarts = run.job_id("trainer"), run.starts("trainer"), run.restarts("trainer")
    before = run.version
    struck_at = strike()
    run.await_true(lambda: run.starts("trainer") > starts or is_away(run, "trainer"))
    sighting = run.sighting("trainer")
    resumed, stepped_at = run.await_generation_after(before)
    lost = max((new.step for at, new, _ in run.published() if at < struck_at), default=0) - resumed
    figures = {
        "restarts": run.restarts("trainer"),
        "steps_lost": max(0, lost),
        "recovery_s": round(stepped_at - struck_at, 1),
        "first_step_s": round(stepped_at - run.started_at("trainer"), 1),
    }
    row = keep(run, name, sighting, figures)
    assert run.job_id("trainer") == job_id
    assert row["restarts"] == restarts + 1
    assert row["steps_lost"] <= COMMIT_EVERY_STEPS
    assert f"restart {restarts + 1}" in run.areal_hpc("status", str(run.paths.root))


def preempt_at(run: SlurmRun, point: str) -> float:
    """Preempt the trainer while one of its ranks is held at a point."""
    run.hold(point)
    struck_at = run.preempt("trainer")
    run.await_true(lambda: run.is_told_to_stop("trainer"))
    time.sleep(AFTER_SIGNAL_S)
    run.release(point)
    return struck_at


def requeue(run: SlurmRun) -> float:
    run.cluster.slurm("scontrol", "requeue", run.job_id("trainer"))
    return time.time()


def limit_time(run: SlurmRun) -> None:
    """Start the trainer with a short limit: an administrator holds the job, changes it, lets go."""
    job_id, before = run.job_id("trainer"), run.version
    run.cluster.slurm("scontrol", "requeuehold", job_id)
    run.await_true(lambda: run.state("trainer") in ("REQUEUE_HOLD", "PENDING"))
    assert "held" in run.sighting("trainer").why
    run.cluster.slurm("scontrol", "update", f"JobId={job_id}", f"TimeLimit={TIME_LIMIT_MIN}")
    run.cluster.slurm("scontrol", "release", job_id)
    run.await_generation_after(before)


def meet_limit(run: SlurmRun) -> float:
    """Wait for the limit, and lift it while the job waits to be started again."""
    run.await_true(lambda: run.is_told_to_stop("trainer"))
    struck_at = time.time()
    run.await_true(lambda: run.state("trainer") == "PENDING")
    run.cluster.slurm("scontrol", "update", f"JobId={run.job_id('trainer')}", "TimeLimit=60")
    return struck_at


def test_a_run_outlives_what_befalls_its_trainer(run: SlurmRun) -> None:
    called_at = time.time()
    run.submit()
    run.await_true(lambda: run.version.step >= 1)
    record("start", {"total": round(time.time() - called_at)})
    befalls_trainer(
        run, "preempted in a collective", lambda: preempt_at(run, "optimizer.before_step")
    )
    befalls_trainer(run, "preempted in a save", lambda: preempt_at(run, "checkpoint.before_rename"))
    befalls_trainer(run, "requeued", lambda: requeue(run))
    limit_time(run)
    befalls_trainer(run, "time limit", lambda: meet_limit(run))
    cancel_and_finish(run)


def befalls_cell(run: SlurmRun, name: str, cell: str, strike: Callable[[str, str], object]) -> None:
    """Strike a cell or its node, and see the run go on without it and then with it again."""
    run.await_whole(since=time.time())
    node, starts, restarts = run.nodes(cell)[0], run.starts(cell), run.restarts(cell)
    struck_at = time.time()
    strike(cell, node)
    run.await_true(lambda: run.starts(cell) > starts or is_away(run, cell))
    sighting = run.sighting(cell)
    run.await_true(lambda: run.starts(cell) > starts)
    again_at = run.started_at(cell)
    whole_at = run.await_whole(since=run.await_ready(cell, again_at))
    meanwhile = {new.step for at, new, _ in run.published(struck_at) if at < whole_at}
    figures = {
        "restarts": run.restarts(cell),
        "steps_meanwhile": len(meanwhile),
        "recovery_s": round(whole_at - struck_at, 1),
    }
    row = keep(run, name, sighting, figures)
    # From 24.11 on Slurm counts one for the node and one for our own request, and starts it once.
    assert row["restarts"] > restarts
    assert meanwhile, "the other cell goes on"
    # A task that ran on below a slurmd that was killed has given way.
    run.await_true(lambda: len(run.proxies_of(cell)) == 1, TASKS_LEAVE_S)
    # Whatever Slurm calls the node by now: 24.11 has it completing for as long as the job lives.
    if name in ("slurmd killed", "node lost"):
        run.cluster.done("restore-node", node, "--timeout-s=100")
    elif name == "node down":
        run.cluster.slurm("scontrol", "update", f"NodeName={node}", "State=RESUME")


def kill_slurmd(run: SlurmRun, node: str) -> None:
    run.cluster.done("kill-node", node, "--only-slurmd")


def set_down(run: SlurmRun, node: str) -> None:
    """Set a node down as administrators do: if it is not drained as well, it comes back."""
    for state in ("DRAIN", "DOWN"):
        run.cluster.slurm("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")


def lose(run: SlurmRun, node: str) -> None:
    """Cut a node's power, and delete that node's own files."""
    run.cluster.done("kill-node", node)
    assert list((run.scratch / node).glob("*/journal*"))
    shutil.rmtree(run.scratch / node)


def memory_runs_out(run: SlurmRun) -> None:
    """Let an agent eat; the kernel kills within the cell's job, whose supervisor starts anew."""
    run.await_whole(since=time.time())
    struck_at = time.time()
    run.feed()
    run.await_true(lambda: bool(run.events("process_exited", struck_at)))
    died = run.events("process_exited", struck_at)[0]
    assert died["role"].startswith("cell-"), died
    assert died["exit_code"] == KILLED
    sighting = run.sighting(died["role"])
    sealed = run.shards_of(died["role"])
    run.await_true(lambda: run.shards_of(died["role"]) > sealed)
    figures = {"recovery_s": round(time.time() - struck_at, 1)}
    keep(run, "out of memory", sighting, figures)
    assert "memory" in sighting.why


def cell_is_cancelled(run: SlurmRun, cell: str) -> None:
    """Cancel one job: nothing submits it again, and the run goes on without it."""
    run.await_whole(since=time.time())
    struck_at = time.time()
    run.cluster.slurm("scancel", run.job_id(cell))
    run.await_true(lambda: run.state(cell) == "CANCELLED")
    sighting = run.sighting(cell)
    run.await_steps(COMMIT_EVERY_STEPS)
    figures = {
        "steps_meanwhile": len({new.step for _, new, _ in run.published(struck_at)}),
        "recovery_s": None,
    }
    keep(run, "cell cancelled", sighting, figures)


def test_a_run_outlives_what_befalls_its_cells(run: SlurmRun) -> None:
    run.submit()
    befalls_cell(run, "cell preempted", "cell-0", lambda cell, node: run.preempt(cell))
    befalls_cell(run, "slurmd killed", "cell-1", lambda cell, node: kill_slurmd(run, node))
    befalls_cell(run, "node down", "cell-0", lambda cell, node: set_down(run, node))
    memory_runs_out(run)
    befalls_cell(run, "node lost", "cell-1", lambda cell, node: lose(run, node))
    cell_is_cancelled(run, "cell-0")
    cancel_and_finish(run)


def test_an_evaluation_job_that_is_preempted_judges_on(run: SlurmRun) -> None:
    often = ("evaluation.every_steps=2", "evaluation.tasks=64")
    run.submit("evaluation.separate_cell=true", *often)
    run.await_true(lambda: len(run.judged()) >= 2)
    starts, begun = run.starts("evaluation"), len(run.events("evaluation_begun"))
    run.await_true(lambda: len(run.events("evaluation_begun")) > begun)
    struck_at = run.preempt("evaluation")
    run.await_true(lambda: run.starts("evaluation") > starts or is_away(run, "evaluation"))
    sighting = run.sighting("evaluation")
    run.await_true(lambda: run.starts("evaluation") > starts)
    judged = len(run.judged())
    run.await_true(lambda: len(run.judged()) > judged)
    figures = {
        "restarts": run.restarts("evaluation"),
        "steps_meanwhile": len({new.step for _, new, _ in run.published(struck_at)}),
        "recovery_s": round(time.time() - struck_at, 1),
    }
    row = keep(run, "evaluation preempted", sighting, figures)
    steps = [step for step, _ in run.judged()]
    assert row["restarts"] == 1
    assert row["steps_meanwhile"] > 0, "training never waits"
    assert len(set(steps)) == len(steps), "no step is judged twice"
    run.areal_hpc("cancel", str(run.paths.root))
    run.await_none_left()


def cancel_and_finish(run: SlurmRun) -> None:
    """Cancel the run, which leaves nothing; resume it, and let it finish."""
    root, began = str(run.paths.root), time.time()
    before = run.version
    run.areal_hpc("cancel", root)
    cancelled_s = round(time.time() - began, 1)
    run.await_none_left()
    assert "quickstart/slurm: cancelled" in run.areal_hpc("status", root)
    why = run.areal_hpc("why", root).splitlines()[0]
    record("events", {"cancelled": {"why": why, "recovery_s": cancelled_s, "audit": run.audited()}})
    called_at = time.time()
    run.areal_hpc("resume", root, f"trainer.total_steps={before.step + STEPS_LEFT}")
    sighting = run.sighting("trainer")
    resumed, stepped_at = run.await_generation_after(before)
    run.await_true(run.paths.finished_marker.exists)
    jobs = ("trainer", "cell-0", "cell-1")
    run.await_true(lambda: {run.state(job) for job in jobs} == {"COMPLETED"})
    figures = {
        "steps_lost": max(0, before.step - resumed),
        "recovery_s": round(stepped_at - called_at, 1),
        "first_step_s": round(stepped_at - run.started_at("trainer"), 1),
    }
    row = keep(run, "resumed", sighting, figures)
    assert row["steps_lost"] == 0, "a graceful end checkpoints"
    assert "quickstart/slurm: finished" in run.areal_hpc("status", root)
    assert row["audit"].endswith("open=0")

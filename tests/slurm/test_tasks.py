"""A job's tasks: their GPUs, clocks that are off, a rank that dies, memory that runs out."""

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from areal_hpc.rundir.jobs import LaunchFile
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.slurm.states import is_slurm_error_line
from tests.slurm.supervised_jobs import TIME_LIMIT_MIN, SupervisedJob
from tests.support.devclusters import Devcluster
from tests.support.environments import CHECKOUT
from tests.support.thoroughness import choose


@pytest.mark.parametrize(
    ("option", "gpus"),
    [("--gres=gpu:3", "0,1,2"), ("--gpus-per-task=1", "0"), ("--mem=401", "None")],
)
def test_processes_see_the_gpus_of_their_task(
    cluster: Devcluster, tmp_path: Path, option: str, gpus: str
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    options = (option,) if option else ()
    job.submit("show_gpus", "--partition=priority", "--nodes=2", *options, tasks=2)
    job.awaits_state("COMPLETED")
    assert sorted(job.words) == [f"task {rank} has GPUs {gpus}" for rank in range(2)]


SHIFTED_CLOCK = """
import os, time
if os.environ.get("SLURM_PROCID") == os.environ["SHIFTED_RANK"]:
    own_time = time.time
    time.time = lambda: own_time() + float(os.environ["SHIFT_S"])
"""


def shift_clock(folder: Path, rank: int, by_s: float) -> tuple[str, ...]:
    """Write lines of a job's script that shift the clock of every Python of one of its tasks."""
    (folder / "sitecustomize.py").write_text(SHIFTED_CLOCK)
    path = f"export PYTHONPATH={folder}:$PYTHONPATH"
    return (path, f"export SHIFTED_RANK={rank} SHIFT_S={by_s}")


@pytest.mark.parametrize("by_s", choose([20.0, -20.0], -20.0))
def test_a_task_whose_clock_is_off_saves_when_the_first_one_stops(
    cluster: Devcluster, tmp_path: Path, by_s: float
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    lines = shift_clock(tmp_path, 1, by_s)
    job.submit("steady", "--partition=priority", "--nodes=2", tasks=2, setup=lines)
    job.awaits_words(2)
    job.run.cancelled_marker.touch()
    job.stop_first_task()
    job.awaits_words(4)
    assert sorted(job.words[2:]) == ["saved 0", "saved 1"]
    job.awaits_state("CANCELLED", "FAILED")


@pytest.mark.thorough
def test_a_first_task_whose_clock_is_behind_stops_before_its_time_limit(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = SupervisedJob(cluster, tmp_path / "run", "trainer")
    lines = shift_clock(tmp_path, 0, -20.0)
    limit = f"--time={TIME_LIMIT_MIN}"
    job.submit("steady", "--partition=priority", "--requeue", limit, setup=lines)
    job.awaits_words(1)
    began_at = time.monotonic()
    job.awaits_words(2)
    # Of the limit, some seconds are for the stop. Slurm looks at limits twice a minute.
    assert time.monotonic() - began_at < 60 * TIME_LIMIT_MIN - 5
    job.awaits(lambda: "began 2" in job.told)
    assert job.told == ["began 1", "saved 0", "began 2"]
    (requeued,) = [row for row in job.events() if row["event"] == "job_requeued"]
    assert requeued["reason"] == "close to the time limit"


RESTARTS = 2


@dataclass
class RankJob(SupervisedJob):
    def launch(self, function: str, tasks: int = 1, **slurm: object) -> LaunchFile:
        launch = super().launch(function, tasks, **slurm)
        (process,) = launch.job.processes
        rank = msgspec.structs.replace(process, is_forked=True, is_rank=True, restarts=RESTARTS)
        job = msgspec.structs.replace(launch.job, processes=[rank])
        return msgspec.structs.replace(launch, job=job)


def test_ranks_start_again_on_their_nodes_and_then_slurm_is_asked(
    cluster: Devcluster, tmp_path: Path
) -> None:
    job = RankJob(cluster, tmp_path / "run", "ranks")
    job.submit("dying_rank", "--partition=priority", "--requeue", "--nodes=2", tasks=2)
    job.awaits(lambda: job.told.count("done") == 2)
    first, last = job.words[: 2 * (1 + RESTARTS)], job.words[2 * (1 + RESTARTS) :]
    assert {word.partition(" at ")[0] for word in first} == {"began 1"}
    assert len(set(first)) == 2, "each time on the same two nodes"
    assert sorted(word.partition(" at ")[0] for word in last) == ["began 2"] * 2 + ["done"] * 2
    assert job.restarts() == 1, "after the last death that is answered within the job"
    events = read_readable_records(job.run.events)
    died = [event for event in events if event["event"] == "process_exited"]
    # Rank 0, which learns of the end of rank 1 from its supervisor alone, is no cause.
    assert [event["exit_code"] for event in died] == [128 + signal.SIGKILL] * (1 + RESTARTS)
    assert sum(event["event"] == "ranks_restarted" for event in events) == RESTARTS


PROGRAM = """
import asyncio, sys
from areal_hpc.errors import ArealError
from areal_hpc.jobs.processes.line_workers import LineProcess
from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.sandbox import SandboxSpec

HOG = "sys.stdin.readline(); held = [b'x' * (64 << 20) for _ in range(64)]"

async def ask_line_process():
    process = LineProcess(
        {"args": [sys.executable, "-c", f"import sys; {HOG}"], "env": {}}, "the gym", 1000
    )
    try:
        await process.ask(b"go")
    finally:
        process.close()

async def call_pool():
    pool = ProcessPool(1)
    try:
        await pool.call(exec, "held = [b'x' * (64 << 20) for _ in range(64)]")
    finally:
        pool.close_idle_workers()

async def run_in_sandbox():
    sandbox = await make_runtime("bwrap").start(SandboxSpec())
    try:
        # keeps all of a line that never ends
        print("exit code", (await sandbox.exec("exec tail /dev/zero")).exit_code, flush=True)
    finally:
        await sandbox.stop()

for one in (ask_line_process, call_pool, run_in_sandbox):
    try:
        asyncio.run(one())
    except ArealError as error:
        print(type(error).__name__, "|", error.problems[0].message, flush=True)
"""


@pytest.mark.timeout(120)
def test_processes_of_ours_are_the_nodes_shortage_and_commands_in_a_sandbox_their_own(
    cluster: Devcluster, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = f"PYTHONPATH={CHECKOUT} OMP_NUM_THREADS=1 {sys.executable} {program}"
    job = cluster.submit(run, "--partition=priority", "--mem=500")
    lines = [line for line in cluster.await_output(job, 3) if not is_slurm_error_line(line)]
    ran_out = "the memory of the job, or of the node, ran out"
    assert lines == [
        f"NodeResourceShortageError | the gym was killed: {ran_out}",
        f"NodeResourceShortageError | the worker process was killed: {ran_out}",
        "exit code 137",
    ]

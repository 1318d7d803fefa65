"""A job's memory runs out beside an episode: who is charged?"""

import sys
from pathlib import Path

import pytest

from areal_hpc.slurm.versions import is_slurm_error_line
from tests.support.devclusters import Devcluster
from tests.support.environments import CHECKOUT

PROGRAM = """
import asyncio, sys
from areal_hpc.errors import ArealError
from areal_hpc.jobs.processes.line_process import LineProcess
from areal_hpc.rollout.execution.process_pool import ProcessPool
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.spec import SandboxSpec

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
    told = [line for line in cluster.await_output(job, 3) if not is_slurm_error_line(line)]
    ran_out = "the memory of the job, or of the node, ran out"
    assert told == [
        f"NodeResourceShortageError | the gym was killed: {ran_out}",
        f"NodeResourceShortageError | the worker process was killed: {ran_out}",
        "exit code 137",
    ]

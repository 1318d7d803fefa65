"""Jobs that run as steps of an allocation: their nodes, srun command lines and handles."""

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_hpc.errors import ClusterError, Problem, RecipeError
from areal_hpc.rundir.jobs import JobSpec, LaunchFile
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.scontrol import Allocation, NodeShare, strip_job_variables
from areal_hpc.slurm.submit import JobHandle


@dataclass(frozen=True, slots=True)
class StepPlacement:
    """Nodes of a job within an allocation, and its share of each."""

    job: str
    nodes: tuple[str, ...]
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int = 1
    memory_mib_per_node: int = 0
    """Memory on each node; 0 if the cluster does not allocate memory."""

    @property
    def tasks(self) -> int:
        return self.tasks_per_node * len(self.nodes)


@dataclass(slots=True)
class _NodeLoad:
    share: NodeShare
    steps: list[StepPlacement] = field(default_factory=list)
    holds_leader: bool = False

    @property
    def gpus_left(self) -> int:
        return self.share.gpus - sum(step.gpus_per_node for step in self.steps)

    @property
    def cpus_left(self) -> int:
        return self.share.cpus - sum(step.tasks_per_node for step in self.steps)


def place_steps(
    jobs: Sequence[JobSpec], allocation: Allocation, *, is_cpu: bool = False
) -> dict[str, StepPlacement]:
    """Choose nodes for every job: first for the leading job, then one for each other task.

    If there are too few nodes jobs share them, the leading job's nodes last.

    Raises:
        RecipeError: The allocation is too small.
    """
    loads = [_NodeLoad(node) for node in allocation.nodes]
    chosen = [_take_nodes_for_job(job, loads, is_cpu, is_leader=job is jobs[0]) for job in jobs]
    whole = [step for step in chosen if step is not None]
    if len(whole) < len(jobs):
        raise RecipeError.from_problems([_describe_shortage(jobs, allocation, is_cpu)])
    return {step.job: _add_shares(step, loads) for step in whole}


def _take_nodes_for_job(
    job: JobSpec, loads: Sequence[_NodeLoad], is_cpu: bool, *, is_leader: bool
) -> StepPlacement | None:
    gpus = 0 if is_cpu else job.gpus_per_task
    emptiest = sorted(loads, key=lambda load: (load.holds_leader, len(load.steps)))
    counts = [job.tasks] if job.is_task_a_node else range(1, job.tasks + 1)
    for count in counts:
        each, rest = divmod(job.tasks, count)
        fitting = [
            load for load in emptiest if load.gpus_left >= each * gpus and load.cpus_left >= each
        ]
        if rest or len(fitting) < count:
            continue
        own = [load for load in loads if load in fitting[:count]]  # in Slurm's order
        step = StepPlacement(job.name, tuple(load.share.name for load in own), each, each * gpus)
        for load in own:
            load.steps.append(step)
            load.holds_leader |= is_leader
        return step
    return None


def _add_shares(step: StepPlacement, loads: Sequence[_NodeLoad]) -> StepPlacement:
    own = [load for load in loads if step in load.steps]
    return replace(
        step,
        cpus_per_task=min(
            (step.tasks_per_node + load.cpus_left // len(load.steps)) // step.tasks_per_node
            for load in own
        ),
        memory_mib_per_node=min(load.share.memory_mib // len(load.steps) for load in own),
    )


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_shortage(jobs: Sequence[JobSpec], allocation: Allocation, is_cpu: bool) -> Problem:
    needs = []
    for job in jobs:
        unit = "node" if job.is_task_a_node else "rank"
        gpus = format_count(0 if is_cpu else job.gpus_per_task, "GPU")
        needs.append(f"{job.name} {format_count(job.tasks, unit)} x {gpus}")
    tasks = sum(job.tasks for job in jobs)
    total = 0 if is_cpu else sum(job.tasks * job.gpus_per_task for job in jobs)
    return Problem(
        f"allocation {allocation.job_id} is too small: {', '.join(needs)}, in all {total} GPUs and "
        f"at least {tasks} CPUs; it has {'; '.join(map(str, allocation.nodes))}",
        "trainer.parallel, inference.cells, inference.replicas_per_cell, inference.tp",
        "lower these, or ask salloc for more nodes, or more of each",
    )


SUPERVISOR_MODULE = "areal_hpc.jobs.supervisor"
TASKS_END_TIMEOUT_S = 120
"""Time after the end of a step's first task at which srun kills those left."""
KILL_TIMEOUT_S = 15.0
"""Time for srun to notice that its tasks were killed."""


def build_step_command(
    placement: StepPlacement, job_id: str, step_name: str, python: str, launch: Path, output: Path
) -> list[str]:
    """Build the srun command line of a job's supervisors; `python` is a shell command.

    Steps share no processor, memory or GPU (`--exact`), and Slurm shows each step its own GPUs.
    """
    return [
        *("srun", f"--jobid={job_id}", f"--job-name={step_name}", "--exact"),
        *(f"--nodes={len(placement.nodes)}", f"--nodelist={','.join(placement.nodes)}"),
        *(f"--ntasks={placement.tasks}", f"--ntasks-per-node={placement.tasks_per_node}"),
        f"--cpus-per-task={placement.cpus_per_task}",
        *([f"--mem={placement.memory_mib_per_node}M"] if placement.memory_mib_per_node else []),
        f"--gres=gpu:{placement.gpus_per_node}" if placement.gpus_per_node else "--gres=none",
        *("--mpi=none", "--input=none", f"--wait={TASKS_END_TIMEOUT_S}", "--open-mode=append"),
        f"--output={output}",
        *(*shlex.split(python), "-u", "-m", SUPERVISOR_MODULE, str(launch)),
    ]


class SrunStepJob(JobHandle):
    """Handle of a job that runs as a step."""

    def __init__(self, launch: LaunchFile, job_id: str, step_name: str, command: Sequence[str]):
        super().__init__(launch, f"{job_id} {step_name}", launch.paths.steps_dir)
        self._allocation, self._step_name = job_id, step_name
        # In a session of its own, so that only the launcher gets a Ctrl-C in the terminal.
        self._srun = subprocess.Popen(
            command,
            env=strip_job_variables(os.environ),  # srun would apply a job's variables to the step
            start_new_session=True,
        )

    def is_done(self) -> bool:
        return self._srun.poll() is not None

    def request_stop(self) -> None:
        if not self.is_done():
            self._srun.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        if self.is_done():
            return
        with contextlib.suppress(ClusterError):  # the step then ends with the allocation
            output = run_slurm_command(
                "squeue", "--steps", f"--jobs={self._allocation}", "--noheader", "--format=%i %j"
            )
            for line in output.splitlines():
                step_id, _, name = line.partition(" ")
                if name.strip() == self._step_name:
                    run_slurm_command("scancel", "--signal=KILL", step_id)
        try:
            self._srun.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._srun.kill()
            self._srun.wait()

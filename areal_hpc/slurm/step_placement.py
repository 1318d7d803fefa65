"""Placement of a stage's jobs as steps on the nodes of an allocation. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.slurm.allocation import Allocation, NodeShare


@dataclass(frozen=True, slots=True)
class StepPlacement:
    """Nodes of one job within an allocation, and what it gets of each."""

    job: str
    nodes: tuple[str, ...]
    tasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int = 1
    memory_mib_per_node: int = 0
    """Of each node; 0 where memory is not shared out."""

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
    """Nodes for every job, by name: the leading job's first, then a node for each other task.

    Jobs share a node where there are fewer nodes than they want, that of the leading job last.

    Raises:
        RecipeError: The allocation is too small.
    """
    loads = [_NodeLoad(node) for node in allocation.nodes]
    chosen = [_take_nodes_for_job(job, loads, is_cpu, is_leader=job is jobs[0]) for job in jobs]
    whole = [step for step in chosen if step is not None]
    if len(whole) < len(jobs):
        raise RecipeError.from_problems([_describe_shortage(jobs, allocation, is_cpu)])
    return {step.job: _add_cpu_and_memory_shares(step, loads) for step in whole}


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


def _add_cpu_and_memory_shares(step: StepPlacement, loads: Sequence[_NodeLoad]) -> StepPlacement:
    own = [load for load in loads if step in load.steps]
    return replace(
        step,
        cpus_per_task=min(
            (step.tasks_per_node + load.cpus_left // len(load.steps)) // step.tasks_per_node
            for load in own
        ),
        memory_mib_per_node=min(load.share.memory_mib // len(load.steps) for load in own),
    )


def _describe_shortage(jobs: Sequence[JobSpec], allocation: Allocation, is_cpu: bool) -> Problem:
    needs = []
    for job in jobs:
        unit = "node" if job.is_task_a_node else "rank"
        shape = f"{job.name} {job.tasks} {unit}{'' if job.tasks == 1 else 's'}"
        gpus = 0 if is_cpu else job.gpus_per_task
        needs.append(f"{shape} x {gpus} GPU" + ("" if gpus == 1 else "s"))
    tasks = sum(job.tasks for job in jobs)
    gpus = 0 if is_cpu else sum(job.tasks * job.gpus_per_task for job in jobs)
    return Problem(
        f"allocation {allocation.job_id} is too small: {', '.join(needs)}, in all {gpus} GPUs and "
        f"at least {tasks} CPUs; it has {'; '.join(map(str, allocation.nodes))}",
        "trainer.parallel, inference.cells, inference.replicas_per_cell, inference.tp",
        "lower these, or ask salloc for more nodes, or more of each",
    )

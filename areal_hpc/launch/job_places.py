"""Places where a foreground launcher runs jobs: this machine, or a Slurm allocation.

On this machine each task of a job gets GPUs of its own. In an allocation each job is a step.
"""

import contextlib
import os
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Self

from areal_hpc.errors import ClusterError, Problem, RecipeError, SlurmTimeoutError
from areal_hpc.jobs.node import (
    VisibleGpus,
    find_visible_gpus,
    read_numa_nodes,
    select_wanted_gpus,
)
from areal_hpc.jobs.starts import SlurmControllerClock, claim_next_start, read_checkpoint_duration_s
from areal_hpc.jobs.supervisor import run_task
from areal_hpc.launch.plan import JobStage, plan_run
from areal_hpc.launch.prepare import PreparedRun
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import WantedGpus
from areal_hpc.rundir.jobs import REQUEUE_MARGIN_S, AllocationStepStart, JobSpec
from areal_hpc.rundir.lock import (
    HEARTBEAT_PERIOD_S,
    AllocationNote,
    StepNote,
    write_allocation_note,
)
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm import scontrol
from areal_hpc.slurm.batch_script import build_container_command
from areal_hpc.slurm.scontrol import Allocation
from areal_hpc.slurm.steps import (
    SrunStepJob,
    StepPlacement,
    build_step_command,
    format_count,
    place_steps,
)
from areal_hpc.slurm.submit import JobHandle, submit_local, write_launch_file

GpuAssignment = Mapping[str, list[list[str]]]
"""GPUs of each task of a job, in the order of ranks, by the job's name."""


def find_usable_gpus(recipe: Recipe, environ: Mapping[str, str]) -> VisibleGpus:
    return select_wanted_gpus(find_visible_gpus(environ), recipe.cluster.gpus, read_numa_nodes())


def find_gpu_problems(
    recipe: Recipe, environ: Mapping[str, str], stages: Sequence[JobStage] | None = None
) -> list[Problem]:
    """Find out why the visible GPUs are not enough for `stages`, by default those of the run."""
    try:
        usable = find_usable_gpus(recipe, environ)
    except RecipeError as error:
        return list(error.problems)
    if stages is None:
        stages = plan_run(recipe, RunPaths(recipe.run_dir))
    return _find_misfits(stages, lambda stage: assign_gpus(stage, usable, recipe))


def _find_misfits(stages: Sequence[JobStage], place: Callable[[JobStage], object]) -> list[Problem]:
    problems: list[Problem] = []
    for stage in stages:
        try:
            place(stage)
        except RecipeError as error:
            problems += error.problems
    return list(dict.fromkeys(problems))


def assign_gpus(stage: JobStage, visible_gpus: VisibleGpus, recipe: Recipe) -> GpuAssignment:
    """Assign GPUs to every task of a stage, no GPU twice: a stage's jobs run at the same time.

    A task that computes on the CPU gets none; `auto` means the CPU only if no GPU is visible.

    Raises:
        RecipeError: There are too few.
    """
    needed = sum(job.tasks * job.gpus_per_task for job in stage.jobs)
    is_cpu = recipe.trainer.device == "auto" and not visible_gpus.ids
    if needed > len(visible_gpus.ids) and not is_cpu:
        raise RecipeError.from_problems([_describe_shortage(stage, needed, visible_gpus, recipe)])
    free = iter(visible_gpus.ids)
    return {
        job.name: [list(islice(free, job.gpus_per_task)) for _ in range(job.tasks)]
        for job in stage.jobs
    }


def format_assignment(assignment: GpuAssignment) -> Iterator[str]:
    for job, tasks in assignment.items():
        if any(tasks):
            yield f"{job}: {' | '.join(','.join(ids) for ids in tasks)}"


def _describe_shortage(
    stage: JobStage, needed: int, visible_gpus: VisibleGpus, recipe: Recipe
) -> Problem:
    keys, keys_to_lower, needs, inference = [], [], [], recipe.inference
    kinds = {job.is_task_a_node for job in stage.jobs}
    for job in stage.jobs:
        shape = f"{job.tasks} ranks x 1"
        if job.is_task_a_node:
            shape = f"{inference.replicas_per_cell} replicas x tp {inference.tp}"
        needs.append(f"{job.name} {shape} = {job.tasks * job.gpus_per_task}")
    if False in kinds:
        keys.append("trainer.parallel")
        keys_to_lower.append("trainer.parallel.dp")
    if True in kinds:
        keys += ["inference.cells", "inference.replicas_per_cell", "inference.tp"]
        keys_to_lower.append("these keys of inference")
    if stage.others and recipe.evaluation.separate_cell:
        keys.append("evaluation.separate_cell")
    visible = len(visible_gpus.ids)
    hint = f"lower {' or '.join(keys_to_lower)}, or use several nodes with areal-hpc submit"
    if visible < len(kinds):
        hint = (
            f"at least {len(kinds)} are needed: trainer ranks and SGLang share none; use "
            "trainer.device=cpu, or nodes with GPUs by areal-hpc submit"
        )
    return Problem(
        f"too few GPUs for the stage {stage.name}: it needs {needed} at once "
        f"({', '.join(needs)}), "
        f"this machine shows {visible} ({visible_gpus.source})",
        ", ".join(keys),
        hint,
    )


class ThisMachine(AbstractContextManager["ThisMachine"]):
    """Place whose jobs are processes of this machine, each with GPUs of its own."""

    def __init__(self, recipe: Recipe, prepared_run: PreparedRun) -> None:
        self._recipe = recipe
        self._prepared_run = prepared_run
        self._gpus: GpuAssignment = {}

    def __exit__(self, *raised: object) -> None:
        """Leave the place; this machine needs no cleanup."""

    def assign_stage(self, stage: JobStage) -> Iterable[str]:
        """Assign resources to each job; return lines that describe them."""
        usable = find_usable_gpus(self._recipe, os.environ)
        self._gpus = assign_gpus(stage, usable, self._recipe)
        if self._recipe.trainer.device == "auto" and not usable.ids:
            return ["GPUs     none on this machine: its CPU computes (trainer.device=auto)"]
        return [f"GPUs     {line}" for line in format_assignment(self._gpus)]

    def submit_job(self, spec: JobSpec) -> JobHandle:
        ready, gpus = self._prepared_run, self._gpus[spec.name]
        lock = str(ready.paths.lock)
        launch = ready.build_launch_file(spec, self._recipe, launcher_lock=lock, gpus=gpus)
        return submit_local(launch, run_task)

    def check_time_left(self) -> None:
        """Raise an error shortly before the place's time limit; this machine has none."""

    def check_place(self) -> None:
        """Raise an error, after a failure of a job, if the place is gone; this machine never is."""


HEARTBEATS_PER_END_CHECK = 3
NEW_ALLOCATION_HINT = "run the same command in a new allocation to resume from the last checkpoint"


class AllocationEndError(ClusterError):
    """Allocation that has ended or ends soon; the run can resume in another one."""


def limit_gpus(allocation: Allocation, wanted_gpus: WantedGpus) -> Allocation:
    """Limit the GPUs of each node to `cluster.gpus`. Pure."""
    if wanted_gpus == "auto":
        return allocation
    if isinstance(wanted_gpus, tuple):
        raise RecipeError(
            f"cluster.gpus=[{', '.join(map(str, wanted_gpus))}] names GPUs; in an allocation Slurm "
            "chooses those of each step",
            key="cluster.gpus",
            hint=f"use cluster.gpus={len(wanted_gpus)}, that many of each node, "
            "or cluster.gpus=auto",
        )
    limit = 0 if wanted_gpus == "none" else wanted_gpus
    nodes = tuple(replace(node, gpus=min(node.gpus, limit)) for node in allocation.nodes)
    return replace(allocation, nodes=nodes)


def place_stage(
    stage: JobStage, recipe: Recipe, allocation: Allocation
) -> dict[str, StepPlacement]:
    """Place the jobs of a stage on nodes; `auto` means the CPU if the allocation has no GPU."""
    usable = limit_gpus(allocation, recipe.cluster.gpus)
    is_cpu = recipe.trainer.device == "auto" and not usable.gpus
    return place_steps(stage.jobs, usable, is_cpu=is_cpu)


def find_allocation_shortages(recipe: Recipe, allocation: Allocation) -> list[Problem]:
    """Find out why an allocation is too small for the stages of a run; each problem once."""
    stages = plan_run(recipe, RunPaths(recipe.run_dir))
    return _find_misfits(stages, lambda stage: place_stage(stage, recipe, allocation))


def format_placement(step: StepPlacement) -> str:
    """Format the nodes of a job and its resources on each."""
    parts = [
        f"{format_count(step.tasks_per_node, 'task')} of {format_count(step.cpus_per_task, 'CPU')}"
    ]
    parts += [format_count(step.gpus_per_node, "GPU")] if step.gpus_per_node else []
    parts += [f"{step.memory_mib_per_node} MiB"] if step.memory_mib_per_node else []
    return f"{step.job:<10} {','.join(step.nodes)}: {', '.join(parts)} each"


def describe_planned_steps(
    recipe: Recipe, allocation: Allocation, pythons: dict[str, str]
) -> Iterator[str]:
    """Describe, line by line, the nodes of every job of a run and the command of its step."""
    paths = RunPaths(recipe.run_dir.resolve())
    for stage in plan_run(recipe, paths):
        yield f"stage {stage.name} in allocation {allocation.job_id}"
        placements = place_stage(stage, recipe, allocation)
        yield from (f"  {format_placement(step)}" for step in placements.values())
        for spec in stage.jobs:
            step, step_name = placements[spec.name], f"{spec.name}.1"
            command = _build_step_command(
                spec, step, step_name, allocation.job_id, recipe, paths, pythons
            )
            yield f"  {shlex.join(command)}"


def _build_step_command(
    spec: JobSpec,
    step: StepPlacement,
    step_name: str,
    job_id: str,
    recipe: Recipe,
    paths: RunPaths,
    pythons: dict[str, str],
) -> list[str]:
    contained = build_container_command(
        recipe.cluster.slurm.container,
        spec.role,
        pythons[spec.role],
        mounted_paths=(paths.root, *((recipe.model.path.resolve(),) if recipe.model.path else ())),
        working_folder=Path.cwd(),
        with_gpus=bool(step.gpus_per_node),
    )
    job = paths.job(spec.name)
    command = build_step_command(
        step, job_id, step_name, contained.python, job.launch, job.steps_dir / f"{step_name}-%t.log"
    )
    return [command[0], *contained.srun_args, *command[1:]]


class HeldAllocation(ThisMachine):
    """Allocation whose `srun` steps are the jobs; it writes heartbeats and stops before its end."""

    def __init__(self, recipe: Recipe, prepared_run: PreparedRun, allocation: Allocation) -> None:
        super().__init__(recipe, prepared_run)
        self._allocation = allocation
        self._clock = SlurmControllerClock()
        self._ends_at = allocation.ends_at
        self._is_preempted = False
        self._placements: dict[str, StepPlacement] = {}
        self._running: dict[str, StepNote] = {}
        self._beat = 0
        self._is_over = threading.Event()
        self._heart = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._write_heartbeat_note()
        self._heart.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        self._heart.join()
        self._prepared_run.paths.allocation_note.unlink(missing_ok=True)

    def _send_heartbeats(self) -> None:
        while not self._is_over.wait(HEARTBEAT_PERIOD_S):
            with contextlib.suppress(OSError):  # storage fails, for the steps as well
                self._write_heartbeat_note()
            if self._beat % HEARTBEATS_PER_END_CHECK == 0:
                with contextlib.suppress(ClusterError):  # the facts of the last query hold
                    facts = scontrol.query_job(self._allocation.job_id)
                    self._ends_at, self._is_preempted = facts.ends_at, facts.is_preempted

    def _write_heartbeat_note(self) -> None:
        self._beat += 1
        steps = list(self._running.values())
        note = AllocationNote(self._allocation.job_id, self._beat, steps)
        self._prepared_run.paths.jobs_dir.mkdir(exist_ok=True)
        write_allocation_note(self._prepared_run.paths, note)

    def assign_stage(self, stage: JobStage) -> Iterable[str]:
        self._placements = place_stage(stage, self._recipe, self._allocation)
        self._running = {}
        return [f"step     {format_placement(step)}" for step in self._placements.values()]

    def submit_job(self, spec: JobSpec) -> JobHandle:
        """Start a job as a step; tasks of its steps with lower numbers stop, on any node."""
        paths, placement = self._prepared_run.paths, self._placements[spec.name]
        job, job_id = paths.job(spec.name), self._allocation.job_id
        network = self._recipe.cluster.slurm.network
        for folder in (job.starts_dir, job.steps_dir):
            folder.mkdir(parents=True, exist_ok=True)
        start = claim_next_start(job.starts_dir, job_id, placement.nodes[0], "")
        step_name = f"{spec.name}.{start.number}"
        step = AllocationStepStart(
            incarnation=f"{job_id}.{start.number}",
            start_number=start.number,
            heartbeat_path=str(paths.allocation_note),
            interface=network.interface,
        )
        others = [other.nodes for name, other in self._placements.items() if name != spec.name]
        launch = self._prepared_run.build_launch_file(
            spec,
            self._recipe,
            network.build_environment_variables(),
            has_own_nodes=set(placement.nodes).isdisjoint(chain(*others)),
            step=step,
            # For a step without GPUs Slurm sets no variable: its processes would see the node's.
            gpus=None if placement.gpus_per_node else [[]] * placement.tasks,
        )
        write_launch_file(launch)
        command = _build_step_command(
            spec, placement, step_name, job_id, self._recipe, paths, self._prepared_run.pythons
        )
        self._running[spec.name] = StepNote(spec.name, step_name, placement.nodes)
        return SrunStepJob(launch, job_id, step_name, command)

    def check_time_left(self) -> None:
        """Raise an AllocationEndError while a save is still possible before the end."""
        if self._is_preempted:
            raise AllocationEndError(
                f"allocation {self._allocation.job_id} is preempted", hint=NEW_ALLOCATION_HINT
            )
        if self._ends_at is None:
            return
        jobs = map(self._prepared_run.paths.job, self._placements)
        lead_s = self._recipe.cluster.stop_grace_s + REQUEUE_MARGIN_S
        lead_s += max(map(read_checkpoint_duration_s, jobs), default=0.0)
        if self._clock.now() >= self._ends_at - lead_s:
            raise AllocationEndError(
                f"allocation {self._allocation.job_id} is close to its time limit",
                hint=NEW_ALLOCATION_HINT,
            )

    def check_place(self) -> None:
        """Raise an AllocationEndError if the allocation is over: its steps end before it does."""
        try:
            facts = scontrol.query_job(self._allocation.job_id)
        except SlurmTimeoutError:
            return  # steps go on without slurmctld
        if facts.state != scontrol.RUNNING_STATE or facts.is_preempted:
            state = "it is preempted" if facts.is_preempted else facts.state
            raise AllocationEndError(
                f"allocation {self._allocation.job_id} was ended (Slurm says {state})",
                hint=NEW_ALLOCATION_HINT,
            )

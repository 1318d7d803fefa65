"""Batch script of a job: its nodes, options of sbatch and srun, and container."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.sections.cluster import (
    ContainerConfig,
    JobOptions,
    SlurmConfig,
    format_flags,
    get_job_kind,
)
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.paths import JobPaths


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    python: str
    """A shell command."""
    srun_args: tuple[str, ...] = ()
    """Options of srun for the container."""


def build_container_command(
    container: ContainerConfig,
    role: str,
    python: str,
    *,
    mounted_paths: Sequence[Path],
    working_folder: Path,
    with_gpus: bool,
) -> ContainerCommand:
    """Build the command that starts `python`, an interpreter inside the site's containers.

    Role `train` gets its own image, every other role that of `serve`. `mounted_paths` and the
    working folder keep their names inside.
    """
    if container.kind == "none":
        return ContainerCommand(shlex.quote(python))
    image = container.train if role == "train" else container.serve
    own_mounts = sorted({str(path) for path in (*mounted_paths, working_folder)})
    mounts = [*own_mounts, *container.mounts]
    if container.kind == "pyxis":
        _check_pyxis_mounts(mounts)
        pairs = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts]
        options = (
            f"--container-image={spell_pyxis_image(image)}",
            f"--container-mounts={','.join(pairs)}",
            f"--container-workdir={working_folder}",
        )
        return ContainerCommand(shlex.quote(python), options)
    command = ["apptainer", "exec", *(["--nv"] if with_gpus else [])]
    command += [f"--bind={mount}" for mount in mounts]
    return ContainerCommand(shlex.join([*command, f"--pwd={working_folder}", image, python]))


def spell_pyxis_image(image: str) -> str:
    """Spell an image for pyxis, which takes a name that begins with `.` or `/` for a file.

    Source: `spank_task_init` of pyxis's pyxis_slurmstepd.c (0.21), which enters the job's folder.
    """
    is_file = image.endswith((".sqsh", ".sqfs", ".squashfs"))
    return f"./{image}" if is_file and not image.startswith((".", "/")) else image


def _check_pyxis_mounts(mounts: Sequence[str]) -> None:
    """Refuse paths that pyxis would split: it splits mounts at commas and at `:`.

    Flags follow a second `:` and are joined by `+` (`parse_mount_option` of its args.c).
    """
    for mount in mounts:
        if "," in mount or mount.count(":") > 2:
            raise RecipeError(
                f"expected HOST_PATH[:CONTAINER_PATH[:FLAG+FLAG]] without commas, got {mount}",
                key="cluster.slurm.container.mounts",
                hint="pyxis splits mounts there; name a path, or a link, without them",
            )


DEFAULT_TIME_LIMIT_MINUTES = 24 * 60
SIGNAL_BEFORE_END_S = 90
"""Time between the warning (SIGUSR2) and the time limit or, if so configured, a preemption."""
PAYLOAD_FILE = "payload.pkl"
"""Payload that submitit runs, kept for further submissions. It only names `launch.json`."""

MEMORY_FLAGS = {"mem", "mem-per-cpu", "mem-per-gpu"}
SHARE_FLAGS = {"cpus-per-task", "exclusive", "gres", "mem", "ntasks-per-node"}
"""Options of sbatch that set a job's share of its nodes."""


@dataclass(frozen=True, slots=True)
class JobResources:
    """Resources that a job holds until its time limit at most."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int
    time_limit_minutes: int

    @property
    def gpu_hours(self) -> float:
        return self.nodes * self.gpus_per_node * self.time_limit_minutes / 60

    @property
    def node_hours(self) -> float:
        return self.nodes * self.time_limit_minutes / 60

    def __str__(self) -> str:
        parts = [f"{self.nodes} node{'s' if self.nodes > 1 else ''}"]
        parts += [f"{self.tasks_per_node} tasks each"] if self.tasks_per_node > 1 else []
        parts += [f"{self.gpus_per_node} GPUs each"] if self.gpus_per_node else []
        return ", ".join([*parts, f"{self.time_limit_minutes / 60:g} h"])


@dataclass(frozen=True, slots=True)
class JobRequest:
    """Request to Slurm for one job."""

    job: str
    """Name within the run."""
    shape: JobResources
    submitit_dir: Path
    """Folder of submitit's files of the job, named without the job id, which is known too late."""
    python: str
    """Shell command that starts the supervisor's Python."""
    parameters: dict[str, Any]
    """Parameters of submitit's SlurmExecutor, under its names."""

    @property
    def name(self) -> str:
        return str(self.parameters["job_name"])

    @property
    def comment(self) -> str:
        return str(self.parameters["comment"])

    @property
    def stays_held(self) -> bool:
        return bool({"hold", "-H"} & self.parameters["additional_parameters"].keys())

    def with_dependency(self, dependency: str, *, stays_if_never_met: bool = False) -> JobRequest:
        """Return the request with a dependency in sbatch's notation.

        Slurm removes the job if the dependency can never be met, unless `stays_if_never_met`: a job
        of another run may come back under another id.
        """
        more = self.parameters["additional_parameters"] | {
            "kill-on-invalid-dep": "no" if stays_if_never_met else "yes"
        }
        changed = {"dependency": dependency, "additional_parameters": more}
        return replace(self, parameters=self.parameters | changed)


@dataclass(frozen=True, slots=True)
class RunContext:
    """Options that all jobs of a run share."""

    name: str
    """Prefix `<experiment>-<trial>` of the jobs' names in the queue."""
    run_dir: Path
    jobs_dir: Path
    pythons: dict[str, str]
    working_folder: Path
    mounted: tuple[Path, ...] = ()
    """Further paths to mount in containers."""
    excluded_nodes: tuple[str, ...] = ()


def build_job_requests(
    jobs: Sequence[JobSpec], slurm: SlurmConfig, run_context: RunContext
) -> list[JobRequest]:
    """Build the request to Slurm of each job.

    Raises:
        RecipeError: Jobs do not fit the nodes; the error names every misfit.
    """
    requests, problems = [], []
    for job in jobs:
        options = slurm.get_options_of_job(job.name)
        try:
            requests.append(
                _build_job_request(
                    job, compute_resources(job, options), options, slurm, run_context
                )
            )
        except RecipeError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise RecipeError.from_problems(problems)
    return requests


def compute_resources(job: JobSpec, options: JobOptions) -> JobResources:
    """Compute a job's nodes from its number of tasks and from the resources of a node.

    Raises:
        RecipeError: The tasks do not fit the nodes.
    """
    kind = get_job_kind(job.name)
    offered, each = options.gpus_per_node, job.gpus_per_task
    key = f"cluster.slurm.jobs.{kind}"
    if job.is_task_a_node:
        tasks_per_node = 1
    elif "ntasks-per-node" in options.sbatch:
        tasks_per_node = min(int(options.sbatch["ntasks-per-node"]), job.tasks)
    elif not each or job.tasks == 1:
        tasks_per_node = job.tasks
    elif offered is None:
        raise RecipeError(
            f"the {kind} job has {job.tasks} GPU tasks, but the number of GPUs per node is not set",
            key="cluster.slurm.gpus_per_node",
            hint="set cluster.slurm.gpus_per_node, for example 8",
        )
    else:
        tasks_per_node = min(offered // each, job.tasks)
    problems = []
    gpus_per_node = max(tasks_per_node, 1) * each
    if offered is not None and gpus_per_node > offered:
        message = f"the {kind} job needs {gpus_per_node} GPUs per node; nodes have {offered}"
        hint = "use fewer ranks a replica, or fewer tasks a node"
        problems.append(Problem(message, f"{key}.gpus_per_node", hint))
    if tasks_per_node and job.tasks % tasks_per_node:
        message = f"{job.tasks} tasks of the {kind} job do not fill nodes of {tasks_per_node} tasks"
        hint = f"use ntasks-per-node that divides {job.tasks}, or another trainer.parallel"
        problems.append(Problem(message, f"{key}.sbatch.ntasks-per-node", hint))
    if problems:
        raise RecipeError.from_problems(problems)
    return JobResources(
        nodes=job.tasks // tasks_per_node,
        tasks_per_node=tasks_per_node,
        gpus_per_node=gpus_per_node,
        time_limit_minutes=options.time_limit_minutes or DEFAULT_TIME_LIMIT_MINUTES,
    )


def _build_job_request(
    job: JobSpec,
    shape: JobResources,
    options: JobOptions,
    slurm: SlurmConfig,
    run_context: RunContext,
) -> JobRequest:
    contained = build_container_command(
        slurm.container,
        job.role,
        run_context.pythons[job.role],
        mounted_paths=(run_context.run_dir, *run_context.mounted),
        working_folder=run_context.working_folder,
        with_gpus=bool(shape.gpus_per_node),
    )
    folder = JobPaths(run_context.jobs_dir / job.name).submitit_dir
    flags = dict(options.sbatch)
    flags.pop("ntasks-per-node", None)  # `shape` has it
    gres = str(flags.pop("gres", "gpu:{count}")).replace("{count}", str(shape.gpus_per_node))
    if "exclusive" in flags and not flags.keys() & MEMORY_FLAGS:
        flags["mem"] = "0"  # all memory of the node
    by_recipe = str(flags.pop("exclude", ""))
    excluded = ",".join(filter(None, (by_recipe, *run_context.excluded_nodes)))
    srun_args = [*contained.srun_args, *format_flags(options.srun)]
    if (
        shape.gpus_per_node
        and shape.tasks_per_node > 1
        and not any(argument.startswith("--distribution=") for argument in srun_args)
    ):
        # Tasks fill sockets in turn, like the numbers of GPUs; by default they alternate.
        srun_args.append("--distribution=block:block")
    if cpus := flags.get("cpus-per-task"):  # since 22.05 srun does not inherit it from sbatch
        srun_args.insert(0, f"--cpus-per-task={cpus}")
    options_or_none = {
        "job_name": f"{run_context.name}-{job.name}",
        "comment": str(run_context.run_dir),
        "nodes": shape.nodes,
        "ntasks_per_node": shape.tasks_per_node,
        "time": shape.time_limit_minutes,
        "partition": options.partition,
        "gres": gres if shape.gpus_per_node else None,
        "exclude": excluded or None,
        "signal_delay_s": SIGNAL_BEFORE_END_S,
        "stderr_to_stdout": True,
        "setup": _build_setup_lines(options, folder, run_context) or None,
        "srun_args": srun_args,
        "additional_parameters": {
            "chdir": str(run_context.working_folder),
            **({} if "no-requeue" in flags else {"requeue": True}),
            **flags,
        },
    }
    parameters = {name: value for name, value in options_or_none.items() if value is not None}
    # A cluster that enforces wckeys would refuse submitit's own.
    parameters |= {"wckey": None}
    return JobRequest(job.name, shape, folder, contained.python, parameters)


def _build_setup_lines(options: JobOptions, folder: Path, run_context: RunContext) -> list[str]:
    # A further submission of this script gets another job id.
    link = shlex.quote(str(folder)) + '/"$SLURM_JOB_ID"_submitted.pkl'
    return [
        *(options.setup or ()),
        "unset SLURM_ARRAY_JOB_ID SLURM_ARRAY_TASK_ID",  # set if submitted from within an array
        f"ln -s {PAYLOAD_FILE} {link} 2>/dev/null || true",
    ]

"""Recipe section `cluster`: file root, environments, Slurm options, containers, network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from areal_hpc.recipe.base import BaseConfig
from areal_hpc.rundir.files import Readers
from areal_hpc.rundir.jobs import CARETAKER_JOB
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, is_cell_job, is_training_cell_job

JobKind = Literal["trainer", "cell", "sft", "evaluation", "caretaker"]
PositiveInt = Annotated[int, Field(ge=1)]
WantedGpus = (
    Literal["auto", "none"]
    | PositiveInt
    | Annotated[tuple[Annotated[int, Field(ge=0)] | str, ...], Field(min_length=1)]
)
FlagName = Annotated[str, Field(pattern="^[a-z][a-z0-9-]*$")]
SlurmFlags = dict[FlagName, StrictBool | int | str]
"""Values of options by their names without dashes; true for an option without a value, false to
leave an option out."""
_REFUSED_SBATCH_FLAGS = {
    "array": "each run is submitted by itself; give each another trial_name",
    "clusters": "jobs of a run are watched and requeued on one cluster; submit on that one",
    "cluster-constraint": "federations are not supported; submit on one cluster",
    "het-group": "each job of a run is submitted separately; set options of `jobs.trainer` and "
    "`jobs.cell`",
    "comment": "a run's jobs are found by their comments",
    "wrap": "the job's command is the supervisor's",
    "test-only": "`areal-hpc doctor RECIPE` tests whether Slurm accepts the jobs",
    "parsable": "`areal-hpc status` lists the jobs' numbers",
}
"""Options of sbatch that a recipe cannot set, with the reason or the alternative."""

_COUNTING_FLAGS = ("cpus-per-task", "ntasks-per-node")


class JobOptions(BaseConfig):
    """Options of a Slurm job; null takes the common option, then the cluster's default."""

    partition: str | None = None
    """Partition, or several with commas."""
    time_limit_minutes: PositiveInt | None = None
    """Time limit, minutes; 1440 (a day) when null."""
    gpus_per_node: PositiveInt | None = None
    """GPUs of a node, over which a trainer's tasks are distributed."""
    sbatch: SlurmFlags = Field(default_factory=dict)
    """Further options of sbatch: `{account: rl, qos: high, exclusive: true, mem: 64G}`. Defaults:
    `ntasks-per-node` is a node's GPUs (on CPUs all tasks); `gres` is `gpu:{count}`, which may name
    a type (`gpu:a100:{count}`); jobs with GPUs request 4 `cpus-per-task` for a trainer rank, for a
    cell 4 per GPU and 4 more, and the `mem` that model and processes need, or all of it if
    `exclusive`; jobs are requeued unless `no-requeue`."""
    srun: SlurmFlags = Field(default_factory=dict)
    """Further options of srun, which starts the tasks: `{cpu-bind: cores}`."""
    setup: tuple[str, ...] | None = None
    """Shell lines to run before the tasks start: `module load cuda`."""

    key_hints: ClassVar[Mapping[str, str]] = {
        name: f"write sbatch: {{{name.replace('_', '-')}: ...}}"
        for name in (
            *(
                "account",
                "constraint",
                "cpus_per_task",
                "exclude",
                "exclusive",
                "gres",
                "mail_user",
            ),
            *("mem", "nodelist", "qos", "reservation"),
        )
    } | {"tasks_per_node": "write sbatch: {ntasks-per-node: ...}"}

    @field_validator("sbatch")
    @classmethod
    def _check_flags(cls, flags: SlurmFlags) -> SlurmFlags:
        for name, value in flags.items():
            if name in _REFUSED_SBATCH_FLAGS:
                raise ValueError(f"--{name} is refused: {_REFUSED_SBATCH_FLAGS[name]}")
            if name in _COUNTING_FLAGS and value is not False and (value is True or int(value) < 1):
                raise ValueError(f"--{name} is a number of at least 1, got {value}")
        return flags


def format_flags(flags: SlurmFlags) -> list[str]:
    """Format options as words of a command line."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items()]


_CARETAKER_OPTIONS = JobOptions(
    time_limit_minutes=15,
    sbatch={"mem": "1G", "cpus-per-task": 1, "ntasks-per-node": 1, "exclusive": False},
)
"""Options of the caretaker, which needs little of a node."""


class ContainerConfig(BaseConfig):
    """Container in which a job's supervisor and all its processes run."""

    kind: Literal["none", "apptainer", "pyxis"] = "none"
    """Program that starts it: apptainer within the task, or srun with the pyxis plugin (enroot)."""
    train: str = ""
    """Image of the trainer and SFT jobs: a file, or a name that the container runtime resolves."""
    serve: str = ""
    """Image of the cells; it holds the environments `serve` and `agents`."""
    mounts: tuple[str, ...] = ()
    """`HOST_PATH` or `HOST_PATH:CONTAINER_PATH[:ro]`, beside run, model and working folder."""

    @model_validator(mode="after")
    def _check_images(self) -> ContainerConfig:
        if self.kind != "none" and not (self.train and self.serve):
            raise ValueError(f"kind={self.kind} needs an image for `train` and one for `serve`")
        return self


class NetworkConfig(BaseConfig):
    """Network between the processes of several nodes."""

    interface: str = ""
    """Interface of addresses, gloo and NCCL's bootstrap (`ib0`); empty: the host name's."""
    nccl: dict[str, str] = Field(default_factory=dict)
    """Further `NCCL_*` variables, such as `NCCL_IB_HCA: mlx5_0,mlx5_1`."""

    @field_validator("nccl")
    @classmethod
    def _check_nccl_names(cls, variables: dict[str, str]) -> dict[str, str]:
        others = [name for name in variables if not name.startswith("NCCL_")]
        if others:
            raise ValueError(f"{', '.join(others)}: set these in variables of a role")
        return variables

    def build_environment_variables(self) -> dict[str, str]:
        """Build the environment variables of gloo and NCCL."""
        env: dict[str, str] = {}
        if self.interface:
            env |= {"GLOO_SOCKET_IFNAME": self.interface, "NCCL_SOCKET_IFNAME": self.interface}
        return env | self.nccl


def get_job_kind(job: str) -> JobKind:
    """Return the kind of a job by its name, such as `cell` for `cell-3`."""
    if is_training_cell_job(job):
        return "cell"
    return "sft" if job == "sft" else "evaluation" if job == EVALUATION_CELL else "trainer"


class SlurmConfig(JobOptions):
    """Slurm options of all jobs, and of each kind of job."""

    jobs: dict[JobKind, JobOptions] = Field(default_factory=dict)
    """Options of one kind of job (trainer, cell, sft, evaluation, caretaker), which win over those
    of all. SFT inherits unset options from `trainer`, the job of `evaluation.separate_cell` from
    `cell`. The caretaker waits until the others have ended, and requests one processor, 1 GiB and
    15 minutes."""
    container: ContainerConfig = ContainerConfig()
    """Container of the jobs; default: none."""
    network: NetworkConfig = NetworkConfig()
    """Network interfaces; default: the one of the host name."""

    def get_options_of_job(self, job: str) -> JobOptions:
        """Merge the options of a job: `trainer`, `sft`, `cell-3`, `evaluation` or `caretaker`.

        Options of sbatch and srun are merged name by name; false removes an option.
        """
        layers: list[JobOptions] = [self]
        kinds: list[JobKind] = ["cell" if is_cell_job(job) else "trainer", get_job_kind(job)]
        if job == CARETAKER_JOB:
            layers, kinds = [self, _CARETAKER_OPTIONS], ["caretaker"]
        layers += [self.jobs[kind] for kind in kinds if kind in self.jobs]
        options: dict[str, Any] = {}
        for layer in layers:
            for name in JobOptions.model_fields:
                value = getattr(layer, name)
                if isinstance(value, dict):
                    merged = options.get(name, {}) | value
                    value = {flag: word for flag, word in merged.items() if word is not False}
                if value is not None:
                    options[name] = value
        return JobOptions(**options)


class RoleEnvironmentConfig(BaseConfig):
    """Python environment of one role."""

    python: str = "auto"
    """Path of Python; `auto`: a checkout's `.venvs/serve` or `.venvs/main`, else the launcher's."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Variables added to the environment of the role's processes."""


class ClusterConfig(BaseConfig):
    """Nodes, interpreters and Slurm options of the jobs."""

    fileroot: Path
    """Shared storage; a run lives in `<fileroot>/<experiment_name>/<trial_name>`."""
    serve: RoleEnvironmentConfig = RoleEnvironmentConfig()
    """SGLang's environment."""
    train: RoleEnvironmentConfig = RoleEnvironmentConfig()
    """Megatron-core's environment."""
    agents: RoleEnvironmentConfig = RoleEnvironmentConfig()
    """The proxy's and the agent's environment."""
    gpus: WantedGpus = "auto"
    """GPUs that `areal-hpc run` may use, of those in CUDA_VISIBLE_DEVICES if it is set: `auto`
    (all), `none`, a number, or a list of names (`[4, 5]`). With `--in-allocation` it is the number
    on each node; then, and with `areal-hpc submit`, Slurm chooses the GPUs."""
    gpu_memory_gib: Annotated[float | None, Field(gt=0)] = None
    """Memory of one GPU; `areal-hpc plan` warns if the run will not fit."""
    readable_by: Readers = "owner"
    """Readers of the run directory, whose mode is 0700 or 0750. Files with keys are 0600."""
    prometheus: bool = False
    """Whether Prometheus can scrape each process, at `/metrics` on a port of its own. The files in
    `prometheus/` of the run directory list the addresses for Prometheus's file_sd_configs."""
    stop_grace_s: Annotated[float, Field(ge=6)] = 12.0
    """Grace period before a stopped job is killed."""
    idle_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Under Slurm: time without the other side after which a cell, or the trainer, ends its job."""
    slurm: SlurmConfig = SlurmConfig()
    """Submission of jobs; `areal-hpc run` ignores it, except `container` and `network` with
    `--in-allocation`."""

    @field_validator("gpus")
    @classmethod
    def _check_gpus_are_distinct(cls, gpus: WantedGpus) -> WantedGpus:
        if isinstance(gpus, tuple) and len(set(map(str, gpus))) < len(gpus):
            raise ValueError("it names a GPU twice")
        return gpus

"""What doctor is asked about, and facts that several checks need, each found out once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from areal_hpc.errors import ClusterError
from areal_hpc.launch.doctor.gpu.examination import GpuExamination
from areal_hpc.launch.slurm_requests import build_remaining_job_requests
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.slurm.batch_script.script import JobRequest
from areal_hpc.slurm.commands import has_slurm, run_slurm_command


@dataclass(frozen=True, slots=True)
class SlurmAnswer:
    settings: Mapping[str, str] = field(default_factory=dict)
    outage: str = ""
    """Why there was none; empty if there was one."""


@dataclass(frozen=True)
class DoctorSubject:
    recipe: Recipe | None = None
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    fileroot: Path | None = None
    has_site: bool = False
    """A site file was given: its user means to submit."""
    may_submit_storage_job: bool = False
    gpu_examination: GpuExamination | None = None
    print_line: Callable[[str], None] = print

    @property
    def involves_slurm(self) -> bool:
        return self.has_site or self.slurm != SlurmConfig()

    @cached_property
    def slurm_answer(self) -> SlurmAnswer:
        if not has_slurm():
            return SlurmAnswer(outage="Slurm's commands are not installed on this machine")
        try:
            shown = run_slurm_command("scontrol", "show", "config")
        except ClusterError as error:
            # Where there is no cluster, Slurm prints all of its search for one; the end says it.
            return SlurmAnswer(outage=error.problems[0].message.splitlines()[-1])
        pairs = (line.partition("=") for line in shown.splitlines() if " = " in line)
        return SlurmAnswer({name.strip(): value.strip() for name, _, value in pairs})

    @cached_property
    def job_requests(self) -> list[JobRequest]:
        return (
            build_remaining_job_requests(self.recipe, Path.cwd()) if self.recipe is not None else []
        )

"""Place of a foreground launcher's jobs: what each of them offers, and what all jobs are told."""

from collections.abc import Iterable
from typing import Protocol

from areal_hpc.jobs.environment import build_role_variables
from areal_hpc.launch.plan import JobStage
from areal_hpc.launch.prepared_run import PreparedRun
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec, LaunchFile
from areal_hpc.rundir.privacy import UMASKS
from areal_hpc.slurm.submit import RunningJobHandle


class JobPlace(Protocol):
    """Where the jobs of a foreground launcher run."""

    def assign_stage_jobs_and_describe(self, stage: JobStage) -> Iterable[str]:
        """Decide what each job gets; the lines that say so."""

    def submit_job(self, spec: JobSpec) -> RunningJobHandle:
        """Start a job of the stage."""

    def raise_if_time_is_up(self) -> None:
        """Called as often as jobs are looked at: may they go on here?"""

    def raise_if_place_is_lost(self) -> None:
        """Called when a job has failed: is the place itself at fault?"""


def build_foreground_launch_file(
    spec: JobSpec, recipe: Recipe, prepared_run: PreparedRun
) -> LaunchFile:
    """What a foreground launcher tells the supervisors of any job."""
    cluster, paths = recipe.cluster, prepared_run.paths
    return LaunchFile(
        job=spec,
        job_dir=str(paths.job(spec.name).root),
        log_dir=str(paths.log_dir(prepared_run.attempt)),
        events=str(paths.events),
        pythons=prepared_run.pythons,
        variables=build_role_variables(recipe),
        recipe=str(paths.recipe),
        umask=UMASKS[cluster.readable_by],
        stop_grace_s=cluster.stop_grace_s,
    )

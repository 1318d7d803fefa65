"""Launcher's own machine as the place of its jobs, whose GPUs are shared out among them."""

import os
from collections.abc import Iterable

import msgspec

from areal_hpc.jobs.environment import build_role_variables
from areal_hpc.jobs.supervisor import run_task
from areal_hpc.launch.plan import JobStage
from areal_hpc.launch.prepared_run import PreparedRun
from areal_hpc.launch.resources.gpu_assignment import (
    GpuAssignment,
    assign_gpus,
    find_usable_gpus,
    format_assignment,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.folders import UMASKS
from areal_hpc.rundir.jobs import JobSpec, LaunchFile
from areal_hpc.slurm.submit import JobHandle, submit_local


class ThisMachine:
    """Runs jobs as processes of this machine, each with GPUs of its own."""

    def __init__(self, recipe: Recipe, prepared_run: PreparedRun) -> None:
        self._recipe = recipe
        self._prepared_run = prepared_run
        self._gpus: GpuAssignment = {}

    def assign_stage_jobs_and_describe(self, stage: JobStage) -> Iterable[str]:
        """Decide what each job gets; lines that say so."""
        usable = find_usable_gpus(self._recipe, os.environ)
        self._gpus = assign_gpus(stage, usable, self._recipe)
        if self._recipe.trainer.device == "auto" and not usable.ids:
            return ["GPUs     none on this machine: its CPU computes (trainer.device=auto)"]
        return [f"GPUs     {line}" for line in format_assignment(self._gpus)]

    def submit_job(self, spec: JobSpec) -> JobHandle:
        """Start a job of the stage."""
        launch = msgspec.structs.replace(
            self._build_launch_file(spec),
            launcher_lock=str(self._prepared_run.paths.lock),
            gpus=self._gpus[spec.name],
        )
        return submit_local(launch, run_task)

    def raise_if_time_is_up(self) -> None:
        """Called as often as jobs are polled. This machine has no time limit."""

    def raise_if_place_is_lost(self) -> None:
        """Called when a job has failed. This machine is there as long as this process."""

    def _build_launch_file(self, spec: JobSpec) -> LaunchFile:
        cluster, paths = self._recipe.cluster, self._prepared_run.paths
        return LaunchFile(
            job=spec,
            job_dir=str(paths.job(spec.name).root),
            log_dir=str(paths.log_dir(self._prepared_run.attempt)),
            events=str(paths.events),
            pythons=self._prepared_run.pythons,
            variables=build_role_variables(self._recipe),
            recipe=str(paths.recipe),
            umask=UMASKS[cluster.readable_by],
            stop_grace_s=cluster.stop_grace_s,
        )

"""A run directory whose jobs are real, small, and under Slurm: what operators' commands look at."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import yaml

from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.paths import RunPaths
from tests.slurm.supervised_jobs import SupervisedJob
from tests.support.commands import areal_hpc, start_areal_hpc
from tests.support.deadlines import scaled
from tests.support.devclusters import Devcluster, light_overrides
from tests.support.environments import CHECKOUT


@dataclass(frozen=True)
class OperatedRun:
    cluster: Devcluster
    paths: RunPaths

    @classmethod
    def make(cls, cluster: Devcluster, fileroot: Path, trial: str) -> "OperatedRun":
        overrides = (
            f"cluster.fileroot={fileroot}",
            f"trial_name={trial}",
            f"cluster.stop_grace_s={scaled(6)}",
        )
        quickstart = CHECKOUT / "recipes" / "quickstart.yaml"
        recipe = load_recipe(quickstart, [*overrides, *light_overrides(fileroot)])
        paths = RunPaths(recipe.run_dir.resolve())
        paths.log_dir(1).mkdir(parents=True)
        paths.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        return cls(cluster, paths)

    def submit(self, name: str, does: str, *options: str, tasks: int = 1) -> SupervisedJob:
        """A job that was submitted, whose one process does a thing of `job_actors.py`."""
        job = SupervisedJob(self.cluster, self.paths.root, name)
        job.files.root.mkdir(parents=True)
        # It has crashed once already: the next crash ends it for good.
        job.files.failure_count.write_text('{"failures":1}')
        job.submit(does, *options, tasks=tasks)
        return job

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        return start_areal_hpc(command, self.paths.root, *arguments, environ=self.cluster.environ)

    def command(self, command: str, *arguments: str, code: int = 0) -> str:
        """What `areal-hpc COMMAND RUN` prints; it must exit with `code`."""
        ended = areal_hpc(command, self.paths.root, *arguments, environ=self.cluster.environ)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

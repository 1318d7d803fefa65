"""A run directory whose jobs are real, small, and under Slurm: what operators' commands look at."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import (
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    Submission,
    record_submission,
)
from areal_hpc.rundir.paths import ROLES, RunPaths
from tests.support.devclusters import Devcluster
from tests.support.environments import CHECKOUT

SCRIPT = """#!/bin/bash
#SBATCH --job-name=quickstart-{trial}-{job}
#SBATCH --comment={run_dir}
#SBATCH --output={folder}/%j_log.out
#SBATCH --open-mode=append
export PYTHONPATH={checkout} OMP_NUM_THREADS=1
srun --output {folder}/%j_%t_log.out {python} -m tests.slurm.small_role {folder}/launch.json
"""


@dataclass(frozen=True)
class OperatedRun:
    cluster: Devcluster
    paths: RunPaths

    @classmethod
    def make(
        cls, cluster: Devcluster, fileroot: Path, trial: str, *overrides: str
    ) -> "OperatedRun":
        names = [f"cluster.fileroot={fileroot}", f"trial_name={trial}", "cluster.stop_grace_s=6"]
        recipe = load_recipe(CHECKOUT / "recipes" / "quickstart.yaml", [*names, *overrides])
        paths = RunPaths(recipe.run_dir.resolve())
        paths.log_dir(1).mkdir(parents=True)
        paths.recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        return cls(cluster, paths)

    def submit(self, job: str, does: str, *options: str, tasks: int = 1) -> str:
        """Submit a job whose one process does a thing of `small_role.py`; its id."""
        entry = "tests.slurm.small_role:role"
        config = {"does": does, "run_dir": str(self.paths.root)}
        spec = ProcessSpec(job.partition("-")[0], "agents", entry, config, ends_job=True)
        folder = self.paths.jobs_dir / job
        folder.mkdir(parents=True)
        # It has crashed once already: the next crash ends it for good.
        (folder / "failures_without_progress.json").write_text('{"failures":1}')
        script = folder / "job.sbatch"
        slurm = SlurmLaunchInfo(
            submissions=str(self.paths.submissions),
            script=str(script),
            excluded_nodes=str(self.paths.excluded_nodes),
            cancelled=str(self.paths.cancelled_marker),
            margin_s=5.0,
            least_free_bytes=64 << 20,
        )
        launch = LaunchFile(
            job=JobSpec(job, "agents", [spec], tasks=tasks),
            job_dir=str(folder),
            log_dir=str(self.paths.log_dir(1)),
            events=str(self.paths.events),
            pythons=dict.fromkeys(ROLES, sys.executable),
            stop_grace_s=6.0,
            slurm=slurm,
        )
        (folder / "launch.json").write_bytes(msgspec.json.encode(launch))
        script.write_text(
            SCRIPT.format(
                trial=self.paths.root.name,
                job=job,
                run_dir=self.paths.root,
                folder=folder,
                checkout=CHECKOUT,
                python=sys.executable,
            )
        )
        job_id = self.cluster.slurm(
            "sbatch", "--parsable", f"--ntasks={tasks}", "--mem=400", *options, str(script)
        )
        submission = Submission(job, job_id, 1, time.time(), str(script))
        record_submission(self.paths.submissions, submission)
        return job_id

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            (sys.executable, "-m", "areal_hpc", command, str(self.paths.root), *arguments),
            cwd=CHECKOUT,
            env={**self.cluster.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def command(self, command: str, *arguments: str, code: int = 0) -> str:
        """What `areal-hpc COMMAND RUN` prints; it must exit with `code`."""
        asked = self.start(command, *arguments)
        said = asked.communicate(timeout=100)[0]
        assert asked.returncode == code, said
        return said

    def log(self, job: str) -> str:
        name = job.partition("-")[0]
        found = sorted(self.paths.log_dir(1).glob(f"{job}/**/{name}*.log"))
        return "\n".join(path.read_text() for path in found)

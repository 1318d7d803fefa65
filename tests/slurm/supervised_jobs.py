"""Jobs whose tasks are supervisors, on a devcluster."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_hpc.rundir.jobs import (
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    latest_by_name,
    read_submissions,
    record_submission,
)
from areal_hpc.rundir.jsonl import read_lines
from tests.support.devclusters import Devcluster
from tests.support.environments import CHECKOUT

RUN_JOB = "import sys; from areal_hpc.jobs.supervisor import run_job; run_job(sys.argv[1])"


@dataclass
class SupervisedJob:
    """One job of a run that lives in `root`."""

    cluster: Devcluster
    root: Path
    name: str
    job_id: str = ""

    @property
    def job_dir(self) -> Path:
        return self.root / "jobs" / self.name

    @property
    def submissions(self) -> Path:
        return self.root / "jobs" / "submissions.jsonl"

    @property
    def excluded_nodes(self) -> Path:
        return self.root / "jobs" / "excluded_nodes.jsonl"

    @property
    def cancelled(self) -> Path:
        return self.root / "CANCELLED"

    def launch(self, function: str, tasks: int = 1, **slurm: object) -> LaunchFile:
        """What its supervisors are told, for a process that does a thing of `job_actors.py`."""
        progress = str(self.root / f"{self.name}.progress")
        config = {"file": str(self._words_path), "progress": progress, "go": str(self._go_path)}
        spec = ProcessSpec(
            "process", "agents", f"tests.slurm.job_actors:{function}", config, ends_job=True
        )
        told = SlurmLaunchInfo(
            submissions=str(self.submissions),
            script=str(self.script),
            excluded_nodes=str(self.excluded_nodes),
            cancelled=str(self.cancelled),
            margin_s=5.0,
            progress=progress,
            least_free_bytes=64 << 20,
        )
        return LaunchFile(
            job=JobSpec(self.name, "agents", [spec], tasks=tasks),
            job_dir=str(self.job_dir),
            log_dir=str(self.root / "logs"),
            events=str(self.root / "events.jsonl"),
            pythons={"agents": sys.executable},
            stop_grace_s=6.0,
            slurm=msgspec.structs.replace(told, **slurm),
        )

    def submit(self, function: str, *options: str, tasks: int = 1, **slurm: object) -> None:
        """Write what the job needs, and submit it."""
        self.job_dir.mkdir(parents=True)
        launch = self.launch(function, tasks, **slurm)
        (self.job_dir / "launch.json").write_bytes(msgspec.json.encode(launch))
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={self.name} --open-mode=append --chdir={CHECKOUT}",
            f"#SBATCH --output={self.job_dir}/out.txt --cpus-per-task=1 --mem=500",
            f"#SBATCH --ntasks={tasks} --ntasks-per-node=1",
            *(f"#SBATCH {option}" for option in options),
            f"export PYTHONPATH={CHECKOUT} OMP_NUM_THREADS=1",
            f"srun {sys.executable} -c '{RUN_JOB}' {self.job_dir}/launch.json",
        ]
        self.script.write_text("\n".join(lines) + "\n")
        self.is_submitted(self.cluster.slurm("sbatch", "--parsable", str(self.script)))

    def is_submitted(self, job_id: str) -> None:
        """Note the number that Slurm gave it."""
        self.job_id = job_id
        record_submission(self.submissions, Submission(self.name, job_id, 1, 0.0, str(self.script)))

    def let_go(self) -> None:
        """Have a process that waits for it end well."""
        self._go_path.touch()

    @property
    def script(self) -> Path:
        return self.job_dir / "job.sbatch"

    @property
    def _go_path(self) -> Path:
        return self.root / f"{self.name}.go"

    @property
    def _words_path(self) -> Path:
        return self.root / f"{self.name}.txt"

    @property
    def words(self) -> list[str]:
        """What its processes wrote."""
        return self._words_path.read_text().splitlines() if self._words_path.exists() else []

    def state(self) -> str:
        return self.cluster.job_state(self.job_id)

    def starts(self) -> int:
        """How often its supervisors have started."""
        folder = self.job_dir / "starts"
        return sum(path.name.isdigit() for path in folder.iterdir()) if folder.exists() else 0

    def shown(self) -> str:
        """All that Slurm says of it."""
        return self.cluster.slurm("scontrol", "show", "job", self.job_id, "--oneliner")

    def restarts(self) -> int:
        """How often Slurm has requeued it."""
        return int(self.shown().split(" Restarts=")[1].split()[0])

    def outcome(self) -> TaskExit:
        """The first task's last word."""
        return msgspec.json.decode((self.job_dir / "task_exit.0.json").read_bytes(), type=TaskExit)

    def newest_id(self) -> str:
        return latest_by_name(read_submissions(self.submissions))[self.name].job_id

    def excluded(self) -> dict[str, str]:
        """Nodes that the run must not get, and why."""
        return {row["node"]: row["reason"] for row in read_lines(self.excluded_nodes)}

    def explain(self) -> str:
        """All that the job left, for a test that failed."""
        out = self.job_dir / "out.txt"
        shown = self.cluster.slurm("scontrol", "show", "job", self.job_id)
        events = read_lines(self.root / "events.jsonl")
        written = out.read_text() if out.exists() else ""
        return "\n".join((shown, json.dumps(events, indent=1), written, *self.words))

"""Jobs whose tasks are supervisors, on a devcluster."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import yaml

from areal_hpc.jobs.caretaker import CaretakerConfig
from areal_hpc.jobs.job_status import StageJobs
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import (
    CARETAKER_JOB,
    JobSpec,
    LaunchFile,
    ProcessSpec,
    SlurmLaunchInfo,
    Submission,
    TaskExit,
    get_latest_submissions,
    read_submissions,
    read_task_exits,
    record_submission,
)
from areal_hpc.rundir.jsonl import read_readable_records
from areal_hpc.rundir.paths import ROLES, JobPaths, RunPaths
from areal_hpc.slurm.script_submission import build_caretaker_dependency
from tests.support.commands import areal_hpc, start_areal_hpc
from tests.support.deadlines import scaled
from tests.support.devclusters import SLURM_POLL_S, Devcluster, light_overrides
from tests.support.environments import CHECKOUT
from tests.support.waiting import wait_for

STOP_GRACE_S = scaled(6.0)
MARGIN_S = scaled(5.0)
TIME_LIMIT_MIN = math.ceil(scaled(49.0) / 60)
"""Shortest time limit of Slurm into which the start, the stop and a save fit."""
RUN_JOB = "import sys; from areal_hpc.jobs.supervisor import run_task; run_task(sys.argv[1])"


@dataclass
class SupervisedJob:
    """One job of a run that lives in `root`."""

    cluster: Devcluster
    root: Path
    name: str
    job_id: str = ""
    others: tuple[str, ...] = ()
    """Jobs that this job's caretaker watches beside the leading one; without any there is none."""
    leader: str = "trainer"

    @property
    def run(self) -> RunPaths:
        return RunPaths(self.root)

    @property
    def files(self) -> JobPaths:
        return self.run.job(self.name)

    def launch(self, function: str, tasks: int = 1, **slurm: object) -> LaunchFile:
        """Build the launch file for a process that runs a function of `job_actors.py`."""
        progress = str(self.root / f"{self.name}.progress")
        config = {"file": str(self._words_path), "progress": progress, "go": str(self._go_path)}
        process, entry = self.name.partition("-")[0], f"tests.slurm.job_actors:{function}"
        processes = [ProcessSpec(process, "agents", entry, config, ends_job=True)]
        if self.others or self.name == CARETAKER_JOB:
            marker = self.run.finished_marker
            stage = StageJobs(leader=self.leader, others=self.others, done_marker=marker)
            caretaker = CaretakerConfig(
                run_dir=self.root, job=self.name, stages=(stage,), poll_s=2.0
            ).build_process_spec(
                CARETAKER_JOB, tasks="first", restarts=3, ends_job=self.name == CARETAKER_JOB
            )
            processes = [*(processes if self.name != CARETAKER_JOB else ()), caretaker]
        info = SlurmLaunchInfo(margin_s=MARGIN_S, progress=progress, least_free_bytes=64 << 20)
        return LaunchFile(
            job=JobSpec(self.name, "agents", processes, tasks=tasks),
            job_dir=str(self.files.root),
            log_dir=str(self.run.log_dir(1)),
            events=str(self.run.events),
            pythons=dict.fromkeys(ROLES, sys.executable),
            stop_grace_s=STOP_GRACE_S,
            slurm=msgspec.structs.replace(info, **slurm),
        )

    def submit(
        self,
        function: str,
        *options: str,
        tasks: int = 1,
        only_now: tuple[str, ...] = (),
        setup: tuple[str, ...] = (),
        **slurm: object,
    ) -> None:
        """Write the job's files, and submit it, this time with some further options.

        `setup` are lines of its script before the tasks start.
        """
        folder = self.files.root
        folder.mkdir(parents=True, exist_ok=True)
        self.files.launch.write_bytes(msgspec.json.encode(self.launch(function, tasks, **slurm)))
        lines = [
            "#!/bin/bash",
            f"#SBATCH --job-name={self.name} --comment={self.root} --chdir={CHECKOUT}",
            f"#SBATCH --output={folder}/%j_log.out --open-mode=append",
            f"#SBATCH --cpus-per-task=1 --mem=400 --ntasks={tasks} --ntasks-per-node=1",
            *(f"#SBATCH {option}" for option in options),
            f"export PYTHONPATH={CHECKOUT} OMP_NUM_THREADS=1",
            *setup,
            f"srun {sys.executable} -c '{RUN_JOB}' {self.files.launch}",
        ]
        self.files.script.write_text("\n".join(lines) + "\n")
        self.cluster.give_to_user(
            *(self.root, folder.parent, folder, self.files.launch, self.files.script)
        )
        self.is_submitted(
            self.cluster.slurm("sbatch", "--parsable", *only_now, str(self.files.script))
        )

    def lay_caretaker(self, *options: str) -> "SupervisedJob":
        """Submit the job that waits behind this one, its run's leading job, and behind others."""
        newest = get_latest_submissions(read_submissions(self.run.submissions))
        others = [newest[name].job_id for name in self.others]
        waits = f"--dependency={build_caretaker_dependency(self.job_id, others)}"
        job = SupervisedJob(
            self.cluster, self.root, CARETAKER_JOB, others=self.others, leader=self.name
        )
        job.submit("", *options, "--kill-on-invalid-dep=yes", only_now=(waits,))
        return job

    def is_submitted(self, job_id: str) -> None:
        self.job_id = job_id
        submission = Submission(self.name, job_id, 1, 0.0, str(self.files.script))
        record_submission(self.run.submissions, submission)
        self.cluster.give_to_user(self.run.submissions)

    def stop_first_task(self) -> None:
        """Send SIGTERM to the supervisor of the first task alone: the others read its note."""

        def is_it(words: list[str], environ: dict[str, str]) -> bool:
            # By its file, because jobs of the tests beside this one have the same numbers.
            is_supervisor = words[-1:] == [str(self.files.launch)] and words[0].endswith("python")
            return is_supervisor and environ.get("SLURM_PROCID") == "0"

        _signal_process(is_it, signal.SIGTERM)

    def kill_process(self) -> None:
        config = str(self.files.process_config(self.name.partition("-")[0]))
        _signal_process(lambda words, _: any(config in word for word in words), signal.SIGKILL)

    def resubmissions(self) -> list[dict[str, object]]:
        return self.events_named("job_submitted_again")

    def events_named(self, name: str) -> list[dict[str, object]]:
        rows = read_readable_records(self.run.events)
        return [e for e in rows if e["event"] == name and e["job"] == self.name]

    def await_successor(self) -> None:
        before = self.job_id
        self.awaits(lambda: self.newest_id() != before)
        self.job_id = self.newest_id()
        self.awaits_state("RUNNING")

    def let_go(self) -> None:
        """Have a process that waits for it end well."""
        self._go_path.touch()

    @property
    def _go_path(self) -> Path:
        return self.root / f"{self.name}.go"

    @property
    def _words_path(self) -> Path:
        return self.root / f"{self.name}.txt"

    @property
    def words(self) -> list[str]:
        return self._words_path.read_text().splitlines() if self._words_path.exists() else []

    @property
    def told(self) -> list[str]:
        """Words without their hosts."""
        return [word.partition(" at ")[0] for word in self.words]

    def state(self) -> str:
        return self.cluster.job_state(self.job_id)

    def nodes(self) -> str:
        return self.cluster.slurm("squeue", "-h", "-j", self.job_id, "-o", "%N")

    def starts(self) -> int:
        folder = self.files.starts_dir
        return sum(path.name.isdigit() for path in folder.iterdir()) if folder.exists() else 0

    def shown(self) -> str:
        return self.cluster.slurm("scontrol", "show", "job", self.job_id, "--oneliner")

    def restarts(self) -> int:
        return self.cluster.restarts(self.job_id)

    def outcome(self) -> TaskExit:
        return read_task_exits(self.files)[0]

    def newest_id(self) -> str:
        return get_latest_submissions(read_submissions(self.run.submissions))[self.name].job_id

    def events(self) -> list[dict[str, object]]:
        return read_readable_records(self.run.events)

    def excluded(self) -> dict[str, str]:
        """Read the nodes that the run must not get, with the reasons."""
        return {
            row["node"]: row["reason"] for row in read_readable_records(self.run.excluded_nodes)
        }

    def awaits(self, condition: Callable[[], bool]) -> None:
        wait_for(condition, 90.0, self._explain, every_s=SLURM_POLL_S)

    def awaits_told(self, *words: str) -> None:
        self.awaits(lambda: self.told == list(words))

    def awaits_state(self, *states: str) -> None:
        self.awaits(lambda: self.state() in states)

    def awaits_words(self, count: int) -> None:
        self.awaits(lambda: len(self.words) >= count)

    def _explain(self) -> str:
        logs = (*self.files.root.glob("*_log.out"), *self.run.log_dir(1).rglob("*.log"))
        written = [f"{path}:\n{path.read_text()}" for path in logs]
        events = json.dumps(read_readable_records(self.run.events), indent=1)
        return "\n".join((self.shown(), events, *written, *self.words))


@dataclass(frozen=True)
class OperatedRun:
    """A run directory whose jobs are real and small, for operators' commands."""

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
        """Submit a job whose one process runs a function of `job_actors.py`."""
        job = SupervisedJob(self.cluster, self.paths.root, name)
        job.files.root.mkdir(parents=True)
        # It has crashed once already: the next crash ends it for good.
        job.files.failure_count.write_text('{"failures":1}')
        job.submit(does, *options, tasks=tasks)
        return job

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        return start_areal_hpc(command, self.paths.root, *arguments, environ=self.cluster.environ)

    def command(self, command: str, *arguments: str, code: int = 0) -> str:
        """Run `areal-hpc COMMAND RUN`, which must exit with `code`, and return its output."""
        ended = areal_hpc(command, self.paths.root, *arguments, environ=self.cluster.environ)
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr


def _signal_process(
    is_it: Callable[[list[str], dict[str, str]], bool], signal_number: signal.Signals
) -> None:
    for process in psutil.process_iter(["environ", "cmdline"]):
        if is_it(process.info["cmdline"] or [], process.info["environ"] or {}):
            os.kill(process.pid, signal_number)
            return
    raise AssertionError("there is no such process")

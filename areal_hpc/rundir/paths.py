"""Paths inside a run directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROLES = ("serve", "train", "agents")
"""The three environments a process can run in."""


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The run directory `<fileroot>/<experiment_name>/<trial_name>` and the names inside it."""

    root: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, written before the first job starts. Resume reads this one."""
        return self.root / "recipe.yaml"

    @property
    def provenance(self) -> Path:
        """Versions, git commit and command line of every launch."""
        return self.root / "provenance.json"

    @property
    def lock(self) -> Path:
        """Held (flock) by a foreground launcher; local jobs stop when it is released."""
        return self.root / "launcher.lock"

    @property
    def data_dir(self) -> Path:
        """Task sets, demonstrations and the starting model as launched."""
        return self.root / "data"

    @property
    def workflow_dir(self) -> Path:
        """The user's agent, where a script handed it over as an object."""
        return self.root / "workflow"

    def dataset(self, split: str) -> Path:
        """The JSON-lines task set of one split (`train`, `valid` or `warmup`)."""
        return self.data_dir / f"{split}.jsonl"

    @property
    def task_counts(self) -> Path:
        """Rows of each source in the training set, a JSON list; only if there are several."""
        return self.data_dir / "train_sources.json"

    @property
    def prefetched(self) -> Path:
        """Revisions and digests of what `areal-hpc prefetch` put in place."""
        return self.root / "prefetch.json"

    @property
    def tiny_model_dir(self) -> Path:
        """The tiny model made for this run, or a link to the hub's model in the cache."""
        return self.data_dir / "model"

    @property
    def jobs_dir(self) -> Path:
        """One folder a job: process configurations and submitit's files."""
        return self.root / "jobs"

    def job(self, name: str) -> JobPaths:
        """The folder of one job."""
        return JobPaths(self.jobs_dir / name)

    @property
    def submissions(self) -> Path:
        """Every job that was handed to Slurm: one JSON object a line."""
        return self.jobs_dir / "submissions.jsonl"

    @property
    def excluded_nodes(self) -> Path:
        """Nodes that failed this run's probe: one JSON object a line."""
        return self.jobs_dir / "excluded_nodes.jsonl"

    @property
    def cancelled_marker(self) -> Path:
        """Exists from `areal-hpc cancel` to the next submission: jobs end without a requeue."""
        return self.root / "CANCELLED"

    @property
    def generations_dir(self) -> Path:
        """One empty file per start of the trainer, created exclusively."""
        return self.root / "epochs"

    @property
    def rendezvous_dir(self) -> Path:
        """One file per live role, mode 0600."""
        return self.root / "rendezvous"

    @property
    def admin_key(self) -> Path:
        """The run's secret for control routes, mode 0600. Agents never see it."""
        return self.rendezvous_dir / "admin.key"

    @property
    def shards_dir(self) -> Path:
        """Sealed trajectories."""
        return self.root / "shards"

    @property
    def index_dir(self) -> Path:
        """Append-only index: one file per writer, one line per sealed shard."""
        return self.root / "index"

    @property
    def manifests_dir(self) -> Path:
        """Batches as they were handed out: the arrival log."""
        return self.root / "manifests"

    def manifest(self, step: int) -> Path:
        """The batch manifest consumed by the step that ends at version `step`."""
        return self.manifests_dir / f"batch_{step:08d}.json"

    @property
    def drops(self) -> Path:
        """Tickets, or their rows, that will not be trained: one JSON object a line."""
        return self.root / "drops.jsonl"

    @property
    def curriculum(self) -> Path:
        """The tasks drawn by `rollout.curriculum`: one JSON object a batch's worth."""
        return self.root / "curriculum.jsonl"

    @property
    def ledger_state(self) -> Path:
        """The ledger's incarnation, newest epoch and published step."""
        return self.root / "ledger.json"

    @property
    def evaluations_dir(self) -> Path:
        """One result file per evaluated step."""
        return self.root / "evaluations"

    def evaluation(self, step: int) -> Path:
        """Held-out rewards of the weights of `step`."""
        return self.evaluations_dir / f"step_{step:08d}.json"

    @property
    def sft_dir(self) -> Path:
        """Commits of the supervised warm-up."""
        return self.root / "warmup"

    @property
    def checkpoints_dir(self) -> Path:
        """Commits of the reinforcement-learning trainer."""
        return self.root / "checkpoints"

    @property
    def weights_dir(self) -> Path:
        """One folder: the version that replicas load with `weights.transport=disk`."""
        return self.root / "weights"

    def export(self, name: str) -> Path:
        """A model in Hugging Face format: `warmup` or `step_00000040`."""
        return self.root / "export" / name

    @property
    def metrics(self) -> Path:
        """One JSON object per trained step; what is known of it later only has lines of its own."""
        return self.root / "metrics.jsonl"

    @property
    def sft_metrics(self) -> Path:
        """One JSON object per logged step of the supervised warm-up."""
        return self.root / "warmup_metrics.jsonl"

    @property
    def tensorboard_dir(self) -> Path:
        """TensorBoard event files."""
        return self.root / "tensorboard"

    @property
    def events(self) -> Path:
        """What happened, by any role: one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def learning_curve(self) -> Path:
        """The learning curve as a picture."""
        return self.root / "learning_curve.png"

    @property
    def replay(self) -> Path:
        """What `areal-hpc replay` was asked for, in the directory of a replay."""
        return self.root / "replay.json"

    @property
    def finished_marker(self) -> Path:
        """Exists when every step of the recipe has been trained and committed."""
        return self.root / "FINISHED"

    @property
    def logs_dir(self) -> Path:
        """One folder per attempt; `latest` links to the newest."""
        return self.root / "logs"

    def log_dir(self, attempt: int) -> Path:
        """Logs of one launch."""
        return self.logs_dir / f"attempt_{attempt:02d}"

    def attempts(self) -> list[int]:
        """Numbers of the launches made so far, oldest first."""
        if not self.logs_dir.is_dir():
            return []
        names = (re.fullmatch(r"attempt_(\d+)", entry.name) for entry in self.logs_dir.iterdir())
        return sorted(int(match[1]) for match in names if match)


def format_step_dir(step: int) -> str:
    """The folder name of a step: `step_00000040`."""
    return f"step_{step:08d}"


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The folder of one job, `jobs/<name>`, and the names inside it."""

    root: Path

    @property
    def launch(self) -> Path:
        """The job as its supervisors are told."""
        return self.root / "launch.json"

    @property
    def script(self) -> Path:
        """What sbatch was given."""
        return self.root / "job.sbatch"

    @property
    def submitit_dir(self) -> Path:
        """Submitit's pickle of the job, and its logs."""
        return self.root / "submitit"

    @property
    def starts_dir(self) -> Path:
        """One numbered file for each start under Slurm, and the notes of its tasks."""
        return self.root / "starts"

    @property
    def failure_count(self) -> Path:
        """How many starts in a row have failed without progress."""
        return self.root / "fruitless.json"

    @property
    def save_time(self) -> Path:
        """Seconds that the last checkpoint took."""
        return self.root / "save_time_s"

    @property
    def hold_note(self) -> Path:
        """Exists while the job has given its nodes back; holds its id."""
        return held_jobs_dir(self.root.parent) / self.root.name

    def process_config(self, process: str) -> Path:
        """The configuration of one process of the job; its last error lies beside it."""
        return self.root / f"{process}.json"

    def task_exit(self, rank: int) -> Path:
        """How one task ended."""
        return self.root / f"outcome.{rank}.json"

    def task_exits(self) -> dict[int, Path]:
        """The files of the tasks that have ended, by rank, in order."""
        found = {int(path.name.split(".")[1]): path for path in self.root.glob("outcome.*.json")}
        return dict(sorted(found.items()))


def held_jobs_dir(jobs_dir: Path) -> Path:
    """One file for each job that waits to be released."""
    return jobs_dir / "held"

"""Paths inside a run directory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROLES = ("serve", "train", "agents")
"""Roles of a run's processes: they serve models, train, or drive agents."""
ENVIRONMENTS = {"serve": "serve", "train": "main", "agents": "main"}
"""Environment below `.venvs/` with the packages of each role."""
RECIPE_FILE = "recipe.yaml"
ADMIN_KEY_FILE = "rendezvous/admin.key"
SERVICE_KEY_FILE = "rendezvous/services.pem"


class _PathDescriptor:
    def __init__(self, relative_path: str) -> None:
        self.name = relative_path

    def __get__(self, folder: _Folder, kind: type[_Folder]) -> Path:
        return folder.root / self.name


@dataclass(frozen=True, slots=True)
class _Folder:
    root: Path


class RunPaths(_Folder):
    """The run directory `<fileroot>/<experiment_name>/<trial_name>` and the names inside it."""

    recipe = _PathDescriptor(RECIPE_FILE)
    """The resolved recipe, written before the first job starts. Resume reads this one."""
    provenance = _PathDescriptor("provenance.json")
    """Versions, commits and command line of every launch."""
    provenance_dir = _PathDescriptor("provenance")
    """Patches that `provenance.json` names."""
    lock = _PathDescriptor("launcher.lock")
    """Lock (flock) of a foreground launcher; local jobs stop when it is released."""
    submission_claim = _PathDescriptor("submission.claim")
    """Exists while a launcher or a caretaker submits; reaches nodes that a lock does not."""
    data_dir = _PathDescriptor("data")
    """Task sets, demonstrations and the starting model as launched."""
    agent_dir = _PathDescriptor("agent")
    """The user's agent, if a script passed it as an object."""
    train_source_sizes = _PathDescriptor("data/train_sources.json")
    """JSON list of the number of rows from each source of the training set, if it has several."""
    starting_model_dir = _PathDescriptor("data/model")
    """The tiny model made for this run, or a link to the hub's model in the cache."""
    jobs_dir = _PathDescriptor("jobs")
    """One folder per job: process configurations and submitit's files."""
    submissions = _PathDescriptor("jobs/submissions.jsonl")
    """One JSON line per job submitted to Slurm."""
    allocation_note = _PathDescriptor("jobs/allocation.json")
    """Heartbeat of a launcher in an allocation, with the nodes of its steps."""
    excluded_nodes = _PathDescriptor("jobs/excluded_nodes.jsonl")
    """One JSON line per node that failed this run's probe."""
    cancelled_marker = _PathDescriptor("CANCELLED")
    """Exists from `areal-hpc cancel` to the next submission: jobs end without a requeue."""
    generations_dir = _PathDescriptor("generations")
    """One empty file per start of the trainer, created exclusively."""
    rendezvous_dir = _PathDescriptor("rendezvous")
    """One file per live role, mode 0600."""
    admin_key = _PathDescriptor(ADMIN_KEY_FILE)
    """Key with which the user's programs open sessions at the run's proxies; mode 0600."""
    service_key = _PathDescriptor(SERVICE_KEY_FILE)
    """Private key and certificate with which the run's processes authenticate; mode 0600."""
    metrics_key = _PathDescriptor("rendezvous/metrics.key")
    """Key that Prometheus sends to read `/metrics` off loopback; mode 0600."""
    shards_dir = _PathDescriptor("shards")
    """Sealed trajectories."""
    kept_files_dir = _PathDescriptor("kept_files")
    """Files of sandboxes by `rollout.agent.sandbox.keep_files`: a tar for each session."""
    shard_index_dir = _PathDescriptor("index")
    """Append-only index: one file per writer, one line per sealed shard."""
    manifests_dir = _PathDescriptor("manifests")
    """Batches as the ledger issued them, one file each."""
    quarantine_dir = _PathDescriptor("quarantine")
    """One file per batch that is not to be trained, named like the batch's manifest."""
    drops = _PathDescriptor("dropped_tickets.jsonl")
    """One JSON line per ticket that will not be trained, wholly or in part."""
    curriculum_draws = _PathDescriptor("curriculum.jsonl")
    """Tasks drawn by `rollout.curriculum`: one JSON line per batch."""
    ledger_state = _PathDescriptor("ledger.json")
    """The ledger's number of starts, newest generation and published step."""
    evaluations_dir = _PathDescriptor("evaluations")
    """One result file per evaluated step."""
    eval_command_runs_dir = _PathDescriptor("separate_evaluations")
    """Evaluations by `areal-hpc eval`, each with a run directory of its own."""
    evaluation_report = _PathDescriptor("evaluation_report.json")
    """Results of `areal-hpc eval`, in the directory of such an evaluation."""
    sft_checkpoints_dir = _PathDescriptor("sft")
    """Checkpoints of the SFT stage."""
    checkpoints_dir = _PathDescriptor("checkpoints")
    """Checkpoints of the reinforcement-learning trainer."""
    sft_export = _PathDescriptor("export/sft")
    """Model after the SFT stage, in Hugging Face format."""
    published_weights_dir = _PathDescriptor("weights")
    """One folder: the version that replicas load with `weights.transport=disk`."""
    metrics = _PathDescriptor("metrics.jsonl")
    """One JSON line per trained step; metrics that become known later have lines of their own."""
    sft_metrics = _PathDescriptor("sft_metrics.jsonl")
    """One JSON object per step of the SFT stage."""
    tensorboard_dir = _PathDescriptor("tensorboard")
    """For TensorBoard's `--logdir`: one folder of event files."""
    trackers_dir = _PathDescriptor("trackers")
    """Output of `areal-hpc sync` for each tracker."""
    events = _PathDescriptor("events.jsonl")
    """One JSON line per event of any role."""
    spans_dir = _PathDescriptor("spans")
    """Timed spans, one file per process. It may be removed."""
    profiles_dir = _PathDescriptor("profiles")
    """Traces of `trainer.profile`, one folder per step. It may be removed."""
    annotations_dir = _PathDescriptor("annotations")
    """The trainer's values for the tokens it learned from, one file per step. It may be removed."""
    prometheus_dir = _PathDescriptor("prometheus")
    """Targets for Prometheus's file_sd_configs, one file per process."""
    replay_arguments = _PathDescriptor("replay.json")
    """Arguments of `areal-hpc replay`, in the directory of a replay."""
    finished_marker = _PathDescriptor("FINISHED")
    """Exists once every step of the recipe has been trained and saved."""
    logs_dir = _PathDescriptor("logs")
    """One folder per attempt to run the recipe."""
    latest_log = _PathDescriptor("logs/latest")
    """Link to the newest attempt's folder."""

    @property
    def tensorboard_run_dir(self) -> Path:
        return self.tensorboard_dir / f"{self.root.parent.name}-{self.root.name}"

    @property
    def run_name(self) -> str:
        return f"{self.root.parent.name}/{self.root.name}"

    def dataset(self, split: str) -> Path:
        return self.data_dir / f"{split}.jsonl"

    def demonstrations(self, key: str) -> Path:
        """Path of the demonstrations at a key of the recipe, such as `sft.dataset`."""
        return self.dataset(key.removesuffix(".dataset").replace(".", "_"))

    def job(self, job_name: str) -> JobPaths:
        return JobPaths(self.jobs_dir / job_name)

    def tracker(self, tracker_name: str) -> TrackerPaths:
        return TrackerPaths(self.trackers_dir / tracker_name)

    def manifest(self, step: int) -> Path:
        return self.manifests_dir / f"batch_{step:08d}.json"

    def quarantine(self, step: int) -> Path:
        return self.quarantine_dir / self.manifest(step).name

    def evaluation(self, step: int, set_name: str = "valid") -> Path:
        """Rewards of the weights of `step` on an evaluation set."""
        folder = self.evaluations_dir
        if set_name != "valid":
            folder /= set_name
        return folder / f"{format_step_dir(step)}.json"

    def evaluated_tickets(self, step: int) -> Path:
        return self.evaluations_dir / f"{format_step_dir(step)}.tickets.jsonl"

    def evaluation_tasks(self, set_name: str) -> Path:
        return self.dataset(set_name if set_name == "valid" else f"evaluation-{set_name}")

    def spans(self, process: str) -> Path:
        return self.spans_dir / f"{process}.jsonl"

    def prometheus_target(self, process: str) -> Path:
        return self.prometheus_dir / f"{process}.json"

    def annotation(self, step: int) -> Path:
        return self.annotations_dir / f"{format_step_dir(step)}.msgpack"

    def profile(self, step: int, file_name: str) -> Path:
        return self.profiles_dir / format_step_dir(step) / file_name

    def list_profiles(self) -> list[Path]:
        return sorted(self.profiles_dir.glob("step_*/[!.]*"))

    def rejudged_rewards(self, function: str) -> Path:
        """New rewards of recorded episodes by `package.module:function`."""
        return self.root / "rewards" / f"{function}.jsonl"

    def export_dir(self, export_name: str) -> Path:
        return self.root / "export" / export_name

    def log_dir(self, attempt: int) -> Path:
        return self.logs_dir / f"attempt_{attempt:02d}"

    @property
    def queue_name(self) -> str:
        """Prefix `<experiment>-<trial>` of the names of the run's jobs in the queue."""
        return f"{self.root.parent.name}-{self.root.name}"

    def list_attempts(self) -> list[int]:
        """Numbers of the launches made so far, oldest first."""
        if not self.logs_dir.is_dir():
            return []
        names = (re.fullmatch(r"attempt_(\d+)", entry.name) for entry in self.logs_dir.iterdir())
        return sorted(int(match[1]) for match in names if match)

    def provenance_copy(self, attempt: int, file_name: str) -> Path:
        return self.provenance_dir / f"attempt_{attempt:02d}.{file_name}"

    def replaced_recipe(self, attempt: int) -> Path:
        return self.root / f"recipe.before_attempt_{attempt:02d}.yaml"

    def list_recipe_files(self) -> Iterator[Path]:
        return self.root.glob("recipe*.yaml")


class JobPaths(_Folder):
    """The folder of one job, `jobs/<name>`, and the names inside it."""

    launch = _PathDescriptor("launch.json")
    """The job's specification, which its supervisors read."""
    script = _PathDescriptor("job.sbatch")
    """Script submitted by sbatch."""
    submitit_dir = _PathDescriptor("submitit")
    """Submitit's pickle of the job, and its logs."""
    steps_dir = _PathDescriptor("steps")
    """Output of srun and the supervisors if the job is a step of an allocation."""
    starts_dir = _PathDescriptor("starts")
    """One numbered file per start under Slurm, and the notes of its tasks."""
    rank_restarts_dir = _PathDescriptor("rank_restarts")
    """Reasons for starting ranks again within a start of the job, one folder per start."""
    failure_count = _PathDescriptor("failures_without_progress.json")
    """Number of consecutive starts that failed without progress."""
    caretaker_submission_count = _PathDescriptor("submissions_without_progress.json")
    """Number of submissions by caretakers, and the run's progress at the last one."""
    cancelled_id = _PathDescriptor("cancelled_id")
    """Job id of the submission that a person cancelled; Slurm itself forgets it."""
    stack_request = _PathDescriptor("stack_request")
    """Time at which a user last asked for the stacks of the job's processes."""
    checkpoint_duration = _PathDescriptor("checkpoint_time_s")
    """Duration of the last checkpoint in seconds."""

    def process_config(self, process: str) -> Path:
        return self.root / f"{process}.json"

    def task_exit(self, rank: int) -> Path:
        return self.root / f"task_exit.{rank}.json"

    def map_task_exit_files(self) -> dict[int, Path]:
        files = {int(path.name.split(".")[1]): path for path in self.root.glob("task_exit.*.json")}
        return dict(sorted(files.items()))


class TrackerPaths(_Folder):
    """The folder of one tracker, `trackers/<name>`, and the names inside it."""

    lock = _PathDescriptor("sync.lock")
    """Lock (flock) of the process that writes a part."""
    run_id = _PathDescriptor("run_id")
    """The tracker's id of the run."""
    unfinished_part = _PathDescriptor(".unfinished")
    """Part that is being written."""

    def get_part(self, part_number: int) -> Path:
        return self.root / f"part_{part_number:06d}"

    def list_parts(self) -> list[Path]:
        return sorted(self.root.glob("part_*"))

    def get_rows_file(self, part_dir: Path) -> Path:
        return part_dir / "rows.jsonl"


def get_process_error_path(config: Path) -> Path:
    return config.with_suffix(".error")


def list_runs(dir_with_runs: Path) -> list[RunPaths]:
    """List the runs below a file root or an experiment's directory, or the run at that path."""
    for levels in ("", "*/", "*/*/"):
        if recipes := sorted(dir_with_runs.glob(f"{levels}{RECIPE_FILE}")):
            return [RunPaths(path.parent.resolve()) for path in recipes]
    return []


def format_step_dir(step: int) -> str:
    return f"step_{step:08d}"


def format_restart_dir(restart: int) -> str:
    return f"restart_{restart:02d}"


def list_restart_dirs(job_log_dir: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.name[8:]), path) for path in job_log_dir.glob("restart_*"))

"""Replay of a run's steps: train again on its recorded batches, without any server.

A replay has a directory of its own, laid out like a run's. Its manifests, shards, task sets and
first checkpoint are links to the recorded ones; it writes nothing outside its directory. Manifests
with rejudged rewards are files of its own.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from areal_hpc.errors import Problem, RecipeError, ShardError
from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.launch.foreground_launcher import ProgressReporter, run_standalone_stage
from areal_hpc.launch.plan import JobStage, build_rank_job, get_initial_policy_path
from areal_hpc.launch.prepare import is_key_within, write_run_recipe
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.source_objectives import resolve_source_objectives
from areal_hpc.rundir.checkpoints import (
    COMPLETE_MARKER_FILE,
    list_checkpoints,
    list_unfinished_checkpoints,
)
from areal_hpc.rundir.files import restrict_new_files, secure_run_dir, write_atomic
from areal_hpc.rundir.manifests import (
    list_manifest_steps,
    read_ledger_state,
    read_manifest,
    read_quarantined_batches,
    record_quarantine,
    write_manifest,
)
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.rundir.rejudged_rewards import (
    RejudgedEpisode,
    replace_rewards,
    require_rejudged_episodes,
)
from areal_hpc.shards.index import read_index
from areal_hpc.shards.verify import list_shard_problems
from areal_hpc.trainer.config import ReplayJobConfig
from areal_hpc.view.learned_rewards import describe_learned_rewards
from areal_hpc.wire.weight_version import GenerationFork

COMPUTE_KEYS = (
    "cluster.train",
    "trainer.checkpoint_every_steps",
    "trainer.device",
    "trainer.keep_checkpoints",
    "trainer.max_tokens_per_microbatch",
    "trainer.offload",
    "trainer.parallel",
    "trainer.profile",
    "trainer.recompute",
)
"""Keys of how a step is computed and saved. They apply to every step of a replay."""
LEARNING_KEYS = (
    "trainer.minibatches",
    "trainer.objective",
    "trainer.optimizer",
    "trainer.total_steps",
)
"""Keys of what a step learns. They apply to the requested steps, not to those before."""
COMPARED_METRICS = ("loss", "grad_norm")
REWARDS_DIGEST = "rewards_digest"
"""Argument of a replay by which rewards of a later judgment are told from those it began with."""


@dataclass(frozen=True, slots=True)
class ReplayStart:
    step: int
    checkpoint: Path | None
    """Checkpoint to start from; None: the model that the run started from."""
    forks: tuple[GenerationFork, ...]
    """Every generation of the run with the step from which it began."""


class RecordedStepsReplay:
    """Replay of a recorded run's steps in `output_run`, which may hold an interrupted replay."""

    def __init__(
        self,
        run: RunPaths,
        first_step: int,
        last_step: int,
        overrides: Sequence[str],
        output_run: RunPaths,
        reward_function: str = "",
    ) -> None:
        compute_overrides, learning_overrides = split_overrides(overrides)
        if reward_function:
            compute_overrides.append("trainer.annotate=all")  # for `describe_learned_rewards`
        self._as_recorded = load_recipe(run.recipe, compute_overrides)
        self.recipe = load_recipe(run.recipe, [*compute_overrides, *learning_overrides])
        self._rejudged = require_rejudged_episodes(run, reward_function) if reward_function else []
        objectives = resolve_source_objectives(self.recipe)
        if self._rejudged and any(objective.credit == "turn" for objective in objectives):
            raise RecipeError(
                "credit=turn trains on rewards of single replies, which were not judged again",
                key="trainer.objective.credit",
                hint="add trainer.objective.credit=episode; the credit of a source stays",
            )
        self._is_changed = bool(learning_overrides or self._rejudged)
        self._run, self._out = run, output_run
        self._first_step, self._last_step = first_step, last_step
        self._request = {"run": str(run.root), "first_step": first_step, "last_step": last_step,
                         "overrides": list(overrides)}  # fmt: skip
        if reward_function:
            self._request["rewards"] = reward_function
            self._request[REWARDS_DIGEST] = digest_rewards(self._rejudged, first_step, last_step)
        _refuse_unusable_output_dir(output_run, run, self._request)
        self.start = find_replay_start(run, first_step)
        self._quarantined = read_quarantined_batches(run)
        check_batches(run, self.start.step + 1, last_step, self._quarantined)

    def replay(self, reporter: ProgressReporter, stop: StopEvent) -> None:
        readers = self.recipe.cluster.readable_by
        with restrict_new_files(readers):
            secure_run_dir(self._out.root, readers)
            self._replay_steps_in_output(reporter, stop)

    def _replay_steps_in_output(self, reporter: ProgressReporter, stop: StopEvent) -> None:
        start, first = self.start, self._first_step
        reporter.print_line(f"start    {start.checkpoint or 'the model that the run started from'}")
        self._prepare_output_dir()
        if self._is_changed and start.step + 1 < first:
            steps = f"steps {start.step + 1} to {first - 1}"
            reporter.print_line(f"lead-in  training {steps} with the recorded settings")
            self._train_steps("lead-in", self._as_recorded, first - 1, reporter, stop)
        self._train_steps("replay", self.recipe, self._last_step, reporter, stop)
        for link, _ in list_unfinished_checkpoints(self._out.checkpoints_dir):
            if link.is_symlink():  # the recorded start; the replay's own checkpoints replace it
                link.unlink()
        last_compared = first - 1 if self._is_changed else self._last_step
        compared_steps = range(start.step + 1, last_compared + 1)
        for line in format_metric_comparison(self._run, self._out, compared_steps):
            reporter.print_line(line)
        if self._rejudged:
            trained = sorted({*range(first, self._last_step + 1)} - self._quarantined.keys())
            for line in describe_learned_rewards(self._run, self._out, trained):
                reporter.print_line(line)

    def _prepare_output_dir(self) -> None:
        run, out = self._run, self._out
        # Written first, atomically: a replay refuses a directory that has files but not this one.
        write_atomic(out.replay_arguments, msgspec.json.encode(self._request))
        out.checkpoints_dir.mkdir(exist_ok=True)
        write_run_recipe(self.recipe, out.recipe)
        folders = ["data_dir", "shards_dir", "shard_index_dir"]
        if self._rejudged:
            self._copy_manifests_with_new_rewards()
        else:
            folders.append("manifests_dir")
        links = {getattr(out, folder): getattr(run, folder) for folder in folders}
        for step, record in self._quarantined.items():
            if self.start.step < step <= self._last_step:
                record_quarantine(out, record)
        links[out.sft_export] = run.sft_export
        if self.start.checkpoint is not None:
            links[out.checkpoints_dir / self.start.checkpoint.name] = self.start.checkpoint
        for link, target in links.items():
            if target.exists() and not link.is_symlink():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(target)

    def _copy_manifests_with_new_rewards(self) -> None:
        self._out.manifests_dir.mkdir(exist_ok=True)
        for step in range(self.start.step + 1, self._last_step + 1):
            if step not in self._quarantined:
                manifest = read_manifest(self._run, step)
                if step >= self._first_step:
                    manifest = replace_rewards(manifest, self._rejudged)
                write_manifest(self._out, manifest)

    def _train_steps(
        self,
        job_name: str,
        recipe: Recipe,
        last_step: int,
        reporter: ProgressReporter,
        stop: StopEvent,
    ) -> None:
        own_checkpoints = list_checkpoints(self._out.checkpoints_dir)
        if any(checkpoint.state.step >= last_step for checkpoint in own_checkpoints):
            return  # an interrupted replay has trained them
        write_run_recipe(recipe, self._out.recipe)
        config = ReplayJobConfig(
            run_dir=self._out.root,
            model_path=get_initial_policy_path(recipe, self._run),
            sys_path=(str(Path.cwd()),) if recipe.trainer.objective.custom else (),
            first_step=self.start.step + 1,
            last_step=last_step,
            forks=[(fork.generation, fork.base_step) for fork in self.start.forks],
            first_changed_step=self._first_step if self._is_changed else None,
        )
        process = config.build_process_spec(job_name, ends_job=True, uses_gpus=True)
        job = build_rank_job(job_name, recipe, [process])
        done_marker = self._out.checkpoints_dir / format_step_dir(last_step) / COMPLETE_MARKER_FILE
        stage = JobStage(job_name, job, (), done_marker)
        run_standalone_stage(stage, recipe, self._out, reporter=reporter, stop=stop)


def digest_rewards(episodes: Iterable[RejudgedEpisode], first_step: int, last_step: int) -> str:
    """Compute a digest of the new rewards of these steps."""
    rewards = sorted(
        (each.shard, each.rows, each.reward)
        for each in episodes
        if first_step <= each.step <= last_step
    )
    return hashlib.sha256(msgspec.json.encode(rewards)).hexdigest()


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split overrides into those of `COMPUTE_KEYS` and those of `LEARNING_KEYS`."""
    compute_overrides, learning_overrides, problems = [], [], []
    for override in overrides:
        key = override.partition("=")[0]
        if is_key_within(key, COMPUTE_KEYS):
            compute_overrides.append(override)
        elif is_key_within(key, LEARNING_KEYS):
            learning_overrides.append(override)
        else:
            hint = f"override only {', '.join((*LEARNING_KEYS, *COMPUTE_KEYS))}"
            problems.append(Problem("this key cannot be changed in a replay", key, hint))
    if problems:
        raise RecipeError.from_problems(problems)
    return compute_overrides, learning_overrides


def find_replay_start(run: RunPaths, first_step: int) -> ReplayStart:
    """Find the newest checkpoint before `first_step`."""
    checkpoints = list_checkpoints(run.checkpoints_dir)
    recorded = read_ledger_state(run).forks or (checkpoints[-1].state.forks if checkpoints else ())
    forks = tuple(sorted(recorded, key=lambda fork: fork.generation)) or (GenerationFork(1, 0),)
    for checkpoint in reversed(checkpoints):
        if checkpoint.state.step < first_step:
            return ReplayStart(checkpoint.state.step, checkpoint.path, forks)
    return ReplayStart(0, None, forks)


def find_step_range(run: RunPaths, reward_function: str = "") -> tuple[int, int]:
    """Return the first and last recorded step, or the first and last with these new rewards."""
    steps = list_manifest_steps(run)
    if reward_function:
        steps = [episode.step for episode in require_rejudged_episodes(run, reward_function)]
    if not steps:
        raise RecipeError("the run has recorded no batch yet", key=str(run.manifests_dir))
    return min(steps), max(steps)


def list_trained_steps(run: RunPaths, first_step: int, last_step: int) -> list[int]:
    """List the steps whose batch is not quarantined, and check that batch."""
    quarantined = read_quarantined_batches(run)
    check_batches(run, first_step, last_step, quarantined)
    return sorted({*range(first_step, last_step + 1)} - quarantined.keys())


def check_batches(
    run: RunPaths, first_step: int, last_step: int, quarantined: Collection[int]
) -> None:
    recorded = list_manifest_steps(run)
    missing = sorted({*range(first_step, last_step + 1)} - {*recorded})
    if missing:
        available = f"steps {recorded[0]} to {recorded[-1]}" if recorded else "no step"
        raise RecipeError(
            f"the batch of step {missing[0]} is not recorded; the run holds {available}",
            key=str(run.manifests_dir),
            hint="choose other steps",
        )
    index = {shard.file: shard for shard in read_index(run.shard_index_dir)}
    steps = range(first_step, last_step + 1)
    manifests = [read_manifest(run, step) for step in steps if step not in quarantined]
    problems = []
    for name in sorted({ticket.shard for manifest in manifests for ticket in manifest.tickets}):
        path = run.shards_dir / name
        messages = (
            list_shard_problems(path, index[name]) if name in index else ["it is not in the index"]
        )
        hint = "run areal-hpc shards verify"
        problems += [Problem(message, str(path), hint) for message in messages]
    if problems:
        raise ShardError.from_problems(problems)


def format_metric_comparison(run: RunPaths, output_run: RunPaths, steps: range) -> Iterator[str]:
    if not steps:
        yield "compare  skipped: the overrides change what is learned"
        return
    recorded, replayed = (
        {line["step"]: line for line in read_metrics(paths.metrics)} for paths in (run, output_run)
    )
    compared = [step for step in steps if step in recorded and "loss" in recorded[step]]
    if len(compared) < len(steps):
        yield f"compare  the run has metrics of {len(compared)} of these {len(steps)} steps"
    different = [
        (step, name, recorded[step][name], replayed[step][name])
        for step in compared
        for name in COMPARED_METRICS
        if recorded[step][name] != replayed[step][name]
    ]
    if different:
        step, name, before, now = different[0]
        count = len({step for step, *_ in different})
        yield f"compare  step {step}: {name} {now!r}, recorded {before!r}"
        yield f"         {count} of {len(compared)} steps differ"
    elif compared:
        equal = "loss and gradient norm equal the recorded ones, bit for bit"
        yield f"compare  steps {compared[0]} to {compared[-1]}: {equal}"


def _refuse_unusable_output_dir(
    output_run: RunPaths, run: RunPaths, request: dict[str, Any]
) -> None:
    if output_run.root.is_relative_to(run.root):
        raise RecipeError(
            f"{output_run.root} is inside the recorded run, which is read-only",
            key="--out",
            hint="name a directory outside",
        )
    if not output_run.root.exists() or (
        output_run.root.is_dir() and not any(output_run.root.iterdir())
    ):
        return
    recorded = None
    if output_run.replay_arguments.exists():
        recorded = msgspec.json.decode(output_run.replay_arguments.read_bytes())
    if recorded != request:
        message = f"something else is already at {output_run.root}"
        if recorded and recorded | {REWARDS_DIGEST: request.get(REWARDS_DIGEST)} == request:
            message = (
                f"{output_run.root} is a replay with former rewards of {request['rewards']}, and "
                "episodes have been judged again since"
            )
        raise RecipeError(message, key="--out", hint="choose a directory that does not exist")

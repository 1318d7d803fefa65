"""Train again from what a run recorded, without any server: which steps, from where, with what.

A replay has a directory of its own in the form of a run's. Its manifests, shards and task sets are
links to the recorded ones, as is the checkpoint it starts from; it writes nothing outside.
"""

from collections.abc import Collection, Iterator, Sequence
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
)
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.shards.index import read_index
from areal_hpc.shards.verify import list_shard_problems
from areal_hpc.trainer.config import ReplayJobConfig
from areal_hpc.wire.weight_version import GenerationFork

COMPUTE_KEYS = (
    "cluster.train",
    "trainer.checkpoint_every_steps",
    "trainer.device",
    "trainer.keep_checkpoints",
    "trainer.max_tokens_per_microbatch",
    "trainer.offload",
    "trainer.parallel",
    "trainer.recompute",
)
"""Keys that say how a step is computed and kept. They hold for every step of a replay."""
LEARNING_KEYS = (
    "trainer.minibatches",
    "trainer.objective",
    "trainer.optimizer",
    "trainer.total_steps",
)
"""Keys that say what a step learns. They hold for the steps asked for, not for those before."""
COMPARED_METRICS = ("loss", "grad_norm")


@dataclass(frozen=True, slots=True)
class ReplayStart:
    step: int
    checkpoint: Path | None
    """None: the model that the run started from."""
    forks: tuple[GenerationFork, ...]
    """Every generation of the run with the step it began from."""


class RecordedStepsReplay:
    """Steps of a recorded run, to be trained again in `output_run`, which may be an earlier try."""

    def __init__(
        self,
        run: RunPaths,
        first_step: int,
        last_step: int,
        overrides: Sequence[str],
        output_run: RunPaths,
    ) -> None:
        computed, learnt = split_overrides(overrides)
        self._as_recorded = load_recipe(run.recipe, computed)
        self.recipe = load_recipe(run.recipe, [*computed, *learnt])
        self._is_changed = bool(learnt)
        self._run, self._out = run, output_run
        self._first_step, self._last_step = first_step, last_step
        self._request = {"run": str(run.root), "first_step": first_step, "last_step": last_step,
                         "overrides": list(overrides)}  # fmt: skip
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
            if link.is_symlink():  # the start, replaced by checkpoints of our own
                link.unlink()
        last_same = first - 1 if self._is_changed else self._last_step
        for line in format_metric_comparison(
            self._run, self._out, range(start.step + 1, last_same + 1)
        ):
            reporter.print_line(line)

    def _prepare_output_dir(self) -> None:
        run, out = self._run, self._out
        # First and whole: a directory that holds anything else is refused by the next try.
        write_atomic(out.replay_arguments, msgspec.json.encode(self._request))
        out.checkpoints_dir.mkdir(exist_ok=True)
        write_run_recipe(self.recipe, out.recipe)
        places = ["data_dir", "shards_dir", "shard_index_dir", "manifests_dir"]
        links = {getattr(out, place): getattr(run, place) for place in places}
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

    def _train_steps(
        self,
        job_name: str,
        recipe: Recipe,
        last_step: int,
        reporter: ProgressReporter,
        stop: StopEvent,
    ) -> None:
        if any(one.state.step >= last_step for one in list_checkpoints(self._out.checkpoints_dir)):
            return  # by an earlier try
        write_run_recipe(recipe, self._out.recipe)
        config = ReplayJobConfig(
            run_dir=self._out.root,
            model_path=get_initial_policy_path(recipe, self._run),
            sys_path=(str(Path.cwd()),) if recipe.trainer.objective.custom else (),
            first_step=self.start.step + 1,
            last_step=last_step,
            forks=[(fork.generation, fork.base_step) for fork in self.start.forks],
        )
        process = config.build_process_spec(job_name, ends_job=True, uses_gpus=True)
        job = build_rank_job(job_name, recipe, [process])
        done_marker = self._out.checkpoints_dir / format_step_dir(last_step) / COMPLETE_MARKER_FILE
        stage = JobStage(job_name, job, (), done_marker)
        run_standalone_stage(stage, recipe, self._out, reporter=reporter, stop=stop)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Overrides that say how steps are computed, and those that say what they learn."""
    computed, learnt, problems = [], [], []
    for item in overrides:
        key = item.partition("=")[0]
        if is_key_within(key, COMPUTE_KEYS):
            computed.append(item)
        elif is_key_within(key, LEARNING_KEYS):
            learnt.append(item)
        else:
            hint = f"override only {', '.join((*LEARNING_KEYS, *COMPUTE_KEYS))}"
            problems.append(Problem("this key cannot be changed in a replay", key, hint))
    if problems:
        raise RecipeError.from_problems(problems)
    return computed, learnt


def find_replay_start(run: RunPaths, first_step: int) -> ReplayStart:
    """The newest checkpoint from which `first_step` can still be reached."""
    checkpoints = list_checkpoints(run.checkpoints_dir)
    known = read_ledger_state(run).forks or (checkpoints[-1].state.forks if checkpoints else ())
    forks = tuple(sorted(known, key=lambda fork: fork.generation)) or (GenerationFork(1, 0),)
    for one in reversed(checkpoints):
        if one.state.step < first_step:
            return ReplayStart(one.state.step, one.path, forks)
    return ReplayStart(0, None, forks)


def check_batches(
    run: RunPaths, first_step: int, last_step: int, quarantined: Collection[int]
) -> None:
    held = list_manifest_steps(run)
    missing = sorted({*range(first_step, last_step + 1)} - {*held})
    if missing:
        have = f"steps {held[0]} to {held[-1]}" if held else "no step"
        raise RecipeError(
            f"the batch of step {missing[0]} is not recorded; the run holds {have}",
            key=str(run.manifests_dir),
            hint="choose other steps",
        )
    index = {shard.file: shard for shard in read_index(run.shard_index_dir)}
    steps = range(first_step, last_step + 1)
    manifests = [read_manifest(run, step) for step in steps if step not in quarantined]
    problems = []
    for name in sorted({ticket.shard for one in manifests for ticket in one.tickets}):
        path = run.shards_dir / name
        found = (
            list_shard_problems(path, index[name]) if name in index else ["it is not in the index"]
        )
        problems += [Problem(one, str(path), "run areal-hpc shards verify") for one in found]
    if problems:
        raise ShardError.from_problems(problems)


def format_metric_comparison(run: RunPaths, output_run: RunPaths, steps: range) -> Iterator[str]:
    if not steps:
        yield "compare  skipped: the overrides change what is learned"
        return
    recorded, replayed = (
        {line["step"]: line for line in read_metrics(paths.metrics)} for paths in (run, output_run)
    )
    known = [step for step in steps if step in recorded and "loss" in recorded[step]]
    if len(known) < len(steps):
        yield f"compare  the run has metrics of {len(known)} of these {len(steps)} steps"
    different = [
        (step, name, recorded[step][name], replayed[step][name])
        for step in known
        for name in COMPARED_METRICS
        if recorded[step][name] != replayed[step][name]
    ]
    if different:
        step, name, before, now = different[0]
        count = len({step for step, *_ in different})
        yield f"compare  step {step}: {name} {now!r}, recorded {before!r}"
        yield f"         {count} of {len(known)} steps differ"
    elif known:
        equal = "loss and gradient norm equal the recorded ones, bit for bit"
        yield f"compare  steps {known[0]} to {known[-1]}: {equal}"


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
    if (
        not output_run.replay_arguments.exists()
        or msgspec.json.decode(output_run.replay_arguments.read_bytes()) != request
    ):
        raise RecipeError(
            f"something else is already at {output_run.root}",
            key="--out",
            hint="choose a directory that does not exist",
        )

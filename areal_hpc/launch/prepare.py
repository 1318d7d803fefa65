"""Preparation of a run: check its recipe, set up its directory, and lock it for this launcher."""

import json
import logging
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, reduce
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.dataset.demonstrations import parse_demonstration
from areal_hpc.dataset.sources import count_materialized_rows, materialize_task_sets
from areal_hpc.errors import ClusterError, Problem, RecipeError
from areal_hpc.jobs.config import build_role_variables, get_interpreters
from areal_hpc.launch.checks.inputs import (
    find_input_problems,
    find_missing_folders,
    remove_empty_folders,
)
from areal_hpc.launch.checks.model import find_context_tokens, find_prompt_problems
from areal_hpc.launch.plan import JobStage, PlanInputs, StagePlanner, get_base_model_path, plan_run
from areal_hpc.launch.provenance import record_provenance
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.cross_checks import find_likely_mistakes, find_repeated_rows
from areal_hpc.recipe.hub_cache import find_snapshot
from areal_hpc.recipe.keys import (
    flatten_keys,
    flatten_keys_hiding_private_values,
    hide_private_values_equal_in,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.trainer import compute_learning_rate
from areal_hpc.rollout.episodes.episode_spec import check_task_limits
from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.rundir.files import (
    UMASKS,
    restrict_new_files,
    secure_run_dir,
    write_atomic,
    write_atomic_private,
)
from areal_hpc.rundir.jobs import JobSpec, LaunchFile
from areal_hpc.rundir.lock import check_no_live_launcher, claim_submission, hold_lock
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.rundir.rendezvous import ensure_admin_key, ensure_service_key
from areal_hpc.slurm.commands import has_slurm
from areal_hpc.slurm.run_jobs import LiveJob, list_live_jobs

log = logging.getLogger(__name__)

MAX_TOKENIZER_TRAINING_ROWS = 2000
"""Maximum number of demonstrations that the tiny model's tokenizer is trained on."""
IMMUTABLE_RECIPE_KEYS = (
    "seed",
    "model",
    "train_dataset",
    "valid_dataset",
    "evaluation.sets",
    "sft",
    "rollout.n_samples",
    "trainer.batch_size",
)
"""Keys that a run never changes, because its recorded data depends on them."""
KEYS_WITHOUT_EFFECT_ON_TRAINED_MODEL = ("cluster", "trainer.total_steps")
"""Keys that may differ from those of a finished run: its model does not depend on them."""

ABSOLUTE_PATH_KEYS = (
    "model.path",
    "trainer.objective.kl.reference",
    "trainer.objective.teacher.path",
    "trainer.objective.teacher.api_key_file",
    "trainer.objective.critic.model",
)
"""Keys whose paths are absolute in a run's recipe: those of models, and of a file with a key."""
_LIST_ITEM_PATTERN = re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Run directory in which jobs can start."""

    paths: RunPaths
    attempt: int
    pythons: dict[str, str]
    """Interpreter of each role."""
    remaining_stages: tuple[JobStage, ...]
    """Stages that are not done yet."""
    live_jobs: tuple[LiveJob, ...] = ()
    """Jobs of the run that are already pending or running."""

    def build_launch_file(
        self,
        spec: JobSpec,
        recipe: Recipe,
        shared_variables: Mapping[str, str] | None = None,
        *,
        has_own_nodes: bool = False,
        **added: Any,
    ) -> LaunchFile:
        """Build the file that a job's supervisors read; `added` are further fields."""
        cluster, paths = recipe.cluster, self.paths
        return LaunchFile(
            job=spec,
            job_dir=str(paths.job(spec.name).root),
            log_dir=str(paths.log_dir(self.attempt)),
            events=str(paths.events),
            pythons=self.pythons,
            variables=build_role_variables(
                recipe, shared_variables, trainer_is_apart=has_own_nodes
            ),
            recipe=str(paths.recipe),
            umask=UMASKS[cluster.readable_by],
            stop_grace_s=cluster.stop_grace_s,
            **added,
        )


@contextmanager
def prepare_run(
    recipe: Recipe,
    *,
    print_line: Callable[[str], None],
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    known_problems: Sequence[Problem] = (),
    joins_live_jobs: bool = False,
    plan: StagePlanner = plan_run,
    submits: bool = False,
) -> Iterator[PreparedRun]:
    """Set up a run directory, and keep other launchers out of it until the context ends.

    `fresh` moves an earlier run aside first. The user's code is imported from `sys_path` and the
    current folder. `known_problems` are raised together with those found here. Pending or running
    jobs of the run are an error, unless `joins_live_jobs` is set. `submits` keeps out launchers on
    other hosts, too. If the setup fails, a directory that did not exist before is removed again.
    """
    pythons, paths = get_interpreters(recipe), RunPaths(recipe.run_dir.resolve())
    folders = (str(Path.cwd()), *sys_path, str(paths.agent_dir))
    problems = [*known_problems, *find_input_problems(recipe, pythons, folders)]
    if recipe.cluster.slurm.container.kind != "none":  # interpreters are inside the image
        unseen = {f"cluster.{role}.python" for role in ROLES}
        problems = [problem for problem in problems if problem.key not in unseen]
    if problems:
        raise RecipeError.from_problems(problems)
    if not joins_live_jobs:
        check_no_live_jobs(paths)
    if fresh and (archive := archive_run(paths, print_line)) is not None:
        print_line(f"moved    the earlier run to {archive}")
    new_folders = find_missing_folders(paths.root)
    with restrict_new_files(recipe.cluster.readable_by):
        secure_run_dir(paths.root, recipe.cluster.readable_by)
        with ExitStack() as held:
            held.enter_context(hold_lock(paths.lock))
            if submits:
                held.enter_context(claim_submission(paths.submission_claim))
            check_no_live_launcher(paths, print_line)
            # Checked again: another launcher may have submitted jobs since.
            live_jobs = find_live_jobs(paths) if joins_live_jobs else check_no_live_jobs(paths)
            try:
                ready = _set_up_prepared_run(
                    recipe, paths, pythons, folders, print_line, live_jobs, plan
                )
            except BaseException:  # boundary: remove the folders that this launcher has just made
                if new_folders:
                    shutil.rmtree(paths.root)
                    remove_empty_folders(new_folders[1:])
                raise
            yield ready


def _set_up_prepared_run(
    recipe: Recipe,
    paths: RunPaths,
    pythons: dict[str, str],
    folders: tuple[str, ...],
    print_line: Callable[[str], None],
    live_jobs: Sequence[LiveJob],
    plan: StagePlanner,
) -> PreparedRun:
    check_recipe_changes(recipe, paths, print_line)
    if not is_run_finished(recipe, paths):
        paths.finished_marker.unlink(missing_ok=True)  # finished before, with fewer steps
    paths.cancelled_marker.unlink(missing_ok=True)
    facts = write_run_inputs(recipe, paths, print_line, pythons["serve"], folders)
    counts = {"train_dataset": facts.train_tasks} if recipe.train_dataset else {}
    if recipe.sft:
        counts["sft.dataset"] = count_materialized_rows(paths.demonstrations("sft.dataset"))
    for mistake in (*find_likely_mistakes(recipe), *find_repeated_rows(recipe, counts)):
        print_line(f"note     {mistake}")
    _check_prompt_lengths(recipe, paths, print_line)
    # Running jobs write to the log folder of the current attempt.
    newest = max(paths.list_attempts(), default=0)
    attempt = newest if live_jobs else create_attempt_log_dir(paths)
    write_run_recipe(recipe, paths.recipe, paths.replaced_recipe(attempt))
    record_provenance(recipe, paths, attempt, pythons)
    stages = plan(recipe, paths, facts)
    remaining = tuple(stage for stage in stages if not stage.done_marker.exists())
    return PreparedRun(paths, attempt, pythons, remaining, tuple(live_jobs))


def _check_prompt_lengths(
    recipe: Recipe, paths: RunPaths, print_line: Callable[[str], None]
) -> None:
    model_dir = get_base_model_path(recipe, paths)
    context_tokens = find_context_tokens(recipe, model_dir)
    problems: list[Problem] = []
    files = {"train_dataset": paths.dataset("train")} if recipe.train_dataset else {}
    files |= {
        held_out.dataset_key: paths.evaluation_tasks(held_out.name)
        for held_out in recipe.evaluation_sets
    }
    for key, file in files.items():
        prompt_problems, notes = find_prompt_problems(recipe, model_dir, file, key, context_tokens)
        problems += prompt_problems
        for note in notes:
            print_line(f"note     {note}")
    if problems:
        raise RecipeError.from_problems(problems)


def write_run_inputs(
    recipe: Recipe,
    paths: RunPaths,
    print_line: Callable[[str], None],
    serve_python: str,
    sys_path: tuple[str, ...],
) -> PlanInputs:
    """Write task sets, the starting model and the keys; existing ones are kept."""
    for folder in sys_path:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    train = paths.dataset("train")
    check = partial(check_task_limits, recipe.rollout, recipe.proxy.session_timeout_s)
    sources, train_source_sizes = recipe.train_mixture, paths.train_source_sizes
    is_missing = not train.exists() or (sources and not train_source_sizes.exists())
    if recipe.train_dataset is not None and is_missing:
        print_line("data     writing the train set")
        counts = materialize_task_sets(recipe.train_sources, train, check)
        if sources:
            write_atomic(train_source_sizes, json.dumps(counts).encode())
    for held_out in recipe.evaluation_sets:
        tasks_file = paths.evaluation_tasks(held_out.name)
        if not tasks_file.exists():
            print_line(f"data     writing the {held_out.name} set")
            materialize_task_sets([(held_out.dataset, held_out.dataset_key)], tasks_file, check)
    for key, source in recipe.demonstrations.items():
        if not paths.demonstrations(key).exists():
            print_line(f"data     writing {key}")
            materialize_task_sets([(source, key)], paths.demonstrations(key), parse_demonstration)
    if recipe.model.tiny is not None and not (paths.starting_model_dir / "config.json").exists():
        print_line("model    making a tiny Qwen3 and its tokenizer")
        sizes = recipe.model.tiny.model_dump()
        texts = _read_tokenizer_texts(paths.demonstrations("sft.dataset"))
        make_tiny_model(paths.starting_model_dir, texts, seed=recipe.seed, **sizes)
    if recipe.model.hub is not None and not paths.starting_model_dir.exists():
        paths.starting_model_dir.unlink(missing_ok=True)  # a link into a deleted cache
        cached = find_snapshot(recipe.model.hub, "model", "model.hub")
        paths.starting_model_dir.symlink_to(cached)
    ensure_admin_key(paths.admin_key)
    ensure_service_key(paths.service_key)
    return PlanInputs(
        train_tasks=count_materialized_rows(train) if recipe.train_dataset else 0,
        tasks_by_evaluation_set={
            held_out.name: count_materialized_rows(paths.evaluation_tasks(held_out.name))
            for held_out in recipe.evaluation_sets
        },
        serve_python=serve_python,
        sys_path=sys_path,
        tasks_of_sources=json.loads(train_source_sizes.read_text()) if sources else (),
    )


def _read_tokenizer_texts(demonstrations: Path) -> Iterator[str]:
    with demonstrations.open() as stream:
        for _, line in zip(range(MAX_TOKENIZER_TRAINING_ROWS), stream, strict=False):
            yield from parse_demonstration(json.loads(line)).list_texts()


def create_attempt_log_dir(paths: RunPaths) -> int:
    """Create the next log folder and point `latest` to it; return its number."""
    attempt = max(paths.list_attempts(), default=0) + 1
    paths.log_dir(attempt).mkdir(parents=True)
    paths.latest_log.unlink(missing_ok=True)
    paths.latest_log.symlink_to(paths.log_dir(attempt).name)
    return attempt


def check_recipe_changes(
    recipe: Recipe, paths: RunPaths, print_line: Callable[[str], None]
) -> None:
    """Print the changes since the run's last launch; refuse those of immutable keys."""
    if not paths.recipe.exists():
        return
    before, now, changed = _compare_with_launched_recipe(recipe, paths)
    immutable = set(IMMUTABLE_RECIPE_KEYS)
    if before.get("train_dataset", "") is None:  # a run of SFT alone goes on with its tasks
        immutable.remove("train_dataset")
    problems = [
        Problem(
            f"{key} cannot change: this run was started with {before.get(key)!r}, "
            f"got {now.get(key)!r}",
            key,
            "use another trial_name, or --fresh to start over",
        )
        for key in changed
        if is_key_within(key, immutable)
    ]
    if problems:
        raise RecipeError.from_problems(problems)
    for key in changed:
        print_line(f"changed  {key}: {before.get(key)!r} -> {now.get(key)!r}")
    optimizer, steps_key = recipe.trainer.optimizer, "trainer.total_steps"
    if steps_key in changed and optimizer.decay != "constant":
        checkpoint = find_latest_checkpoint(paths.checkpoints_dir)
        step = checkpoint.state.step if checkpoint else 0
        old, new = (
            compute_learning_rate(step, total_steps, optimizer)
            for total_steps in (before[steps_key], recipe.trainer.total_steps)
        )
        print_line(
            f"note     the learning rate decays over {steps_key}: at step {step + 1} it is "
            f"{new:.3g} in place of {old:.3g}"
        )


def check_finished_recipe(recipe: Recipe, paths: RunPaths) -> None:
    """Check that a finished run was trained by this recipe: it will not be trained again."""
    before, now, changed = _compare_with_launched_recipe(recipe, paths)
    more = "" if recipe.train_dataset is None else ", ask for more trainer.total_steps"
    problems = [
        Problem(
            f"the run in {paths.root} is finished, and it was trained with {key}="
            f"{before.get(key)!r}, got {now.get(key)!r}",
            key,
            f"use another trial_name{more}, or --fresh to start over",
        )
        for key in changed
        # Keys of other versions are not the user's, but items of lists are.
        if ((key in before and key in now) or _LIST_ITEM_PATTERN.search(key))
        and not is_key_within(key, KEYS_WITHOUT_EFFECT_ON_TRAINED_MODEL)
    ]
    if problems:
        raise RecipeError.from_problems(problems)


def _compare_with_launched_recipe(
    recipe: Recipe, paths: RunPaths
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the keys of the last launched recipe, those of this one, and the changed keys.

    Values that may be secrets are compared, but hidden in the returned values.
    """
    trees = yaml.safe_load(paths.recipe.read_text()), _dump_with_absolute_paths(recipe)
    before, now = map(flatten_keys, trees)
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    shown_before, shown_now = map(flatten_keys_hiding_private_values, trees)
    return shown_before, shown_now, changed


def _dump_with_absolute_paths(recipe: Recipe) -> dict[str, Any]:
    tree = recipe.model_dump(mode="json")
    values = flatten_keys(recipe.model_dump())
    for key in ABSOLUTE_PATH_KEYS:
        if isinstance(path := values.get(key), Path):
            *sections, last = key.split(".")
            reduce(dict.__getitem__, sections, tree)[last] = str(path.absolute())
    return tree


def is_key_within(key: str, known_keys: Collection[str]) -> bool:
    return any(key == known or key.startswith(f"{known}.") for known in known_keys)


def write_run_recipe(recipe: Recipe, path: Path, replaced: Path | None = None) -> None:
    """Write a resolved recipe that only its owner may read; keep a different old one as `replaced`.

    A value that may be secret stands in one file only: if both recipes have it, in the new one.
    Paths of models become absolute, because later commands may start in another folder.
    """
    tree = _dump_with_absolute_paths(recipe)
    text = yaml.safe_dump(tree, sort_keys=False)
    if replaced is not None and path.exists() and path.read_text() != text:
        before = hide_private_values_equal_in(yaml.safe_load(path.read_text()), tree)
        write_atomic_private(replaced, yaml.safe_dump(before, sort_keys=False).encode())
    # Variables and agent arguments may hold keys of other services.
    write_atomic_private(path, text.encode())


def find_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """List the run's pending and running jobs; none if there is and was no Slurm."""
    if paths.submissions.exists():
        return list_live_jobs(paths)
    try:
        return list_live_jobs(paths) if has_slurm() else []
    except ClusterError as error:  # Slurm is installed here, but no cluster answers
        log.debug("Slurm cannot list the run's jobs: %s", error)
        return []


def check_no_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """Raise a ClusterError if a job of the run is pending or running; return the empty list."""
    if live := find_live_jobs(paths):
        root = shlex.quote(str(paths.root))
        hint = f"wait for them, or cancel them: areal-hpc cancel {root}"
        if any(job.is_held or not job.is_recorded for job in live):
            hint = f"areal-hpc resume {root} takes them over; areal-hpc cancel {root} removes them"
        raise ClusterError(
            "jobs of this run are still pending or running: "
            + ", ".join(f"{job.submission.job} ({job.submission.job_id})" for job in live),
            key=str(paths.root),
            hint=hint,
        )
    return []


def is_run_finished(recipe: Recipe, paths: RunPaths) -> bool:
    """Return whether the run has taken all the steps of the current recipe."""
    if not paths.finished_marker.exists():
        return False
    if recipe.train_dataset is None:
        return paths.sft_export.exists()
    rows = read_metrics(paths.metrics)
    return bool(rows) and int(rows[-1]["step"]) >= recipe.trainer.total_steps


def archive_run(paths: RunPaths, print_line: Callable[[str], None]) -> Path | None:
    """Move an existing run directory aside; return its new path, or None if there was none."""
    if not paths.recipe.exists():
        return None  # nothing has run there
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    archive = paths.root.with_name(f"{paths.root.name}.{stamp}")
    with hold_lock(paths.lock), claim_submission(paths.submission_claim):
        # Check first: the launcher's note would move with the directory.
        check_no_live_launcher(paths, print_line)
        paths.root.rename(archive)
    (archive / paths.submission_claim.name).unlink()
    return archive


def make_run_of_copy(paths: RunPaths, trial_name: str) -> RunPaths:
    """Rename a copy of a run's folder, and remove the original's jobs, addresses and keys.

    Shards, manifests and checkpoints stay: the new run continues from its last checkpoint.

    Raises:
        RecipeError: The folder is no copy, or the name is taken or invalid.
    """
    if not re.fullmatch(r"[\w.-]+", trial_name):
        raise RecipeError(
            f"expected a name of letters, digits, '_', '.' and '-', got {trial_name!r}", key="--as"
        )
    original = load_recipe(paths.recipe).run_dir
    if not original.exists() or original.samefile(paths.root):
        raise RecipeError(
            "--as makes a run of a copy of a run's folder, and this is the run itself",
            key=str(paths.root),
            hint="copy the folder first (cp -a), or leave --as out",
        )
    target = RunPaths(paths.root.parent / trial_name)
    if target.root != paths.root:
        if target.root.exists():
            raise RecipeError(f"there is a run {trial_name!r} already", key=str(target.root))
        paths.root.rename(target.root)
    # The recipe is written last: until then the folder is a copy, so the command can be repeated.
    for folder in (target.jobs_dir, target.rendezvous_dir, target.trackers_dir):
        if folder.exists():
            shutil.rmtree(folder)
    for file in (target.cancelled_marker, target.submission_claim):
        file.unlink(missing_ok=True)
    overrides = {
        "cluster.fileroot": str(target.root.parents[1]),
        "experiment_name": target.root.parent.name,
        "trial_name": trial_name,
    }
    recipe = load_recipe(
        target.recipe, [f"{key}={json.dumps(text)}" for key, text in overrides.items()]
    )
    write_run_recipe(recipe, target.recipe)
    return target

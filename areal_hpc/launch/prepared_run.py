"""A run directory that is checked, set up and locked for this launcher."""

import logging
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from areal_hpc.errors import ClusterError, Problem, RecipeError
from areal_hpc.jobs.environment import get_interpreters
from areal_hpc.launch import input_checks, run_dir_setup
from areal_hpc.launch.checks.model_files import find_context_tokens
from areal_hpc.launch.checks.prompts import find_prompt_problems
from areal_hpc.launch.plan import JobStage, PlanInputs, get_base_model_path, plan_run
from areal_hpc.launch.provenance import record_provenance
from areal_hpc.metrics.step_metrics import read_metrics
from areal_hpc.recipe.cross_checks import find_likely_mistakes
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.allocation_note import wait_and_raise_if_launcher_is_alive
from areal_hpc.rundir.folders import create_or_secure_run_dir, restrict_new_files
from areal_hpc.rundir.lock import claim_submission_or_raise, hold_lock_or_raise
from areal_hpc.rundir.paths import ROLES, RunPaths
from areal_hpc.slurm.commands import has_slurm
from areal_hpc.slurm.run_jobs import LiveJob, list_live_jobs

log = logging.getLogger(__name__)
StagePlanner = Callable[[Recipe, RunPaths, PlanInputs | None], tuple[JobStage, ...]]
"""Plan of the jobs of a recipe; without facts, only their shape."""


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run directory in which jobs can start."""

    paths: RunPaths
    attempt: int
    pythons: dict[str, str]
    """Interpreter of each role."""
    remaining_stages: tuple[JobStage, ...]
    """What is left to do."""
    live_jobs: tuple[LiveJob, ...] = ()
    """Jobs of the run that wait or run already."""


@contextmanager
def prepare_and_lock_run(
    recipe: Recipe,
    *,
    print_line: Callable[[str], None],
    fresh: bool = False,
    sys_path: Sequence[str] = (),
    known_problems: Sequence[Problem] = (),
    joins_live_jobs: bool = False,
    plan: StagePlanner | None = None,
    submits: bool = False,
) -> Iterator[PreparedRun]:
    """Put a run directory in place and keep other launchers out of it.

    `plan` makes the stages: `plan_run` unless another is given.

    `fresh` moves an earlier run aside first. The user's code is imported from `sys_path`, beside
    the present folder. `known_problems` are told with those found here. Jobs of the run that wait
    or run are an error, unless `joins_live_jobs`. A launcher that `submits` keeps those on other
    hosts out, too. A directory that did not exist is removed again
    if it cannot be put in place.

    Raises:
        RecipeError: Something the recipe names is missing or wrong; all problems at once.
        ClusterError: Another launcher, or a job of the run, works in this run directory.
    """
    pythons, paths = get_interpreters(recipe), RunPaths(recipe.run_dir.resolve())
    folders = (str(Path.cwd()), *sys_path, str(paths.agent_dir))
    problems = [
        *known_problems,
        *input_checks.find_input_problems(recipe, pythons, folders),
    ]
    if recipe.cluster.slurm.container.kind != "none":  # its interpreters are not to be seen here
        unseen = {f"cluster.{role}.python" for role in ROLES}
        problems = [problem for problem in problems if problem.key not in unseen]
    if problems:
        raise RecipeError.from_problems(problems)
    if not joins_live_jobs:
        raise_if_live_jobs(paths)
    if fresh and (kept := archive_run(paths, print_line)) is not None:
        print_line(f"moved    the earlier run to {kept}")
    made = input_checks.find_missing_folders(paths.root)
    with restrict_new_files(recipe.cluster.readable_by):
        create_or_secure_run_dir(paths.root, recipe.cluster.readable_by)
        with ExitStack() as held:
            held.enter_context(hold_lock_or_raise(paths.lock))
            if submits:
                held.enter_context(claim_submission_or_raise(paths.submission_claim))
            wait_and_raise_if_launcher_is_alive(paths, print_line)
            # Asked again: another launcher may have submitted some since.
            live_jobs = find_live_jobs(paths) if joins_live_jobs else raise_if_live_jobs(paths)
            try:
                ready = _set_up_prepared_run(
                    recipe, paths, pythons, folders, print_line, live_jobs, plan or plan_run
                )
            except BaseException:  # boundary: what this launcher has just made goes again
                if made:
                    shutil.rmtree(paths.root)
                    input_checks.remove_folders_up_to_first_nonempty(made[1:])
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
    run_dir_setup.report_or_refuse_recipe_changes(recipe, paths, print_line)
    if not is_run_finished(recipe, paths):
        paths.finished_marker.unlink(missing_ok=True)  # it was, with fewer steps
    paths.cancelled_marker.unlink(missing_ok=True)
    facts = run_dir_setup.write_run_inputs_and_keys(
        recipe, paths, print_line, pythons["serve"], folders
    )
    for doubt in find_likely_mistakes(recipe):
        print_line(f"note     {doubt}")
    _report_or_refuse_long_prompts(recipe, paths, print_line)
    # Jobs that run write to the folder of the present attempt.
    newest = max(paths.list_attempts(), default=0)
    attempt = newest if live_jobs else run_dir_setup.create_attempt_log_dir_and_link_latest(paths)
    run_dir_setup.write_recipe_and_keep_replaced(
        recipe, paths.recipe, paths.replaced_recipe(attempt)
    )
    record_provenance(recipe, paths, attempt, pythons)
    stages = plan(recipe, paths, facts)
    left = tuple(stage for stage in stages if not stage.done_marker.exists())
    return PreparedRun(paths, attempt, pythons, left, tuple(live_jobs))


def _report_or_refuse_long_prompts(
    recipe: Recipe, paths: RunPaths, print_line: Callable[[str], None]
) -> None:
    """Compare prompts of the task sets that were written with the context length.

    Raises:
        RecipeError: Most of a task set's prompts leave no room for a reply.
    """
    model_dir = get_base_model_path(recipe, paths)
    context_tokens = find_context_tokens(recipe, model_dir)
    problems: list[Problem] = []
    files = {"train_dataset": paths.dataset("train")} | {
        one.dataset_key: paths.evaluation_tasks(one.name) for one in recipe.evaluation_sets
    }
    for key, file in files.items():
        found, notes = find_prompt_problems(recipe, model_dir, file, key, context_tokens)
        problems += found
        for note in notes:
            print_line(f"note     {note}")
    if problems:
        raise RecipeError.from_problems(problems)


def find_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """The run's jobs that wait or run; none where there is no Slurm and never was."""
    if paths.submissions.exists():
        return list_live_jobs(paths)
    try:
        return list_live_jobs(paths) if has_slurm() else []
    except ClusterError as error:  # its commands are here, and no cluster that answers
        log.debug("Slurm is not asked about the run: %s", error)
        return []


def raise_if_live_jobs(paths: RunPaths) -> list[LiveJob]:
    """Make sure that none of the run's Slurm jobs waits or runs; the empty list.

    Raises:
        ClusterError: Some do, or slurmctld does not answer.
    """
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
    """True if the run has taken all the steps that the recipe now asks for."""
    if not paths.finished_marker.exists():
        return False
    rows = read_metrics(paths.metrics)
    return bool(rows) and int(rows[-1]["step"]) >= recipe.trainer.total_steps


def archive_run(paths: RunPaths, print_line: Callable[[str], None]) -> Path | None:
    """Move an existing run directory aside; its new place, or None when there was none."""
    if not paths.recipe.exists():
        return None  # nothing has been run there
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    kept = paths.root.with_name(f"{paths.root.name}.{stamp}")
    with hold_lock_or_raise(paths.lock), claim_submission_or_raise(paths.submission_claim):
        # The directory would take its note along.
        wait_and_raise_if_launcher_is_alive(paths, print_line)
        paths.root.rename(kept)
    (kept / paths.submission_claim.name).unlink()
    return kept

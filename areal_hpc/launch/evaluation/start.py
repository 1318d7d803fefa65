"""Start of an evaluation without a trainer, here or as a Slurm job, and what it found.

It is one job: a cell that serves what it loads, and a ledger that asks itself.
"""

import os
import shlex
from collections.abc import Callable, Collection, Sequence
from functools import partial

from msgspec.structs import replace

from areal_hpc.dataset.materialize import count_materialized_rows
from areal_hpc.errors import Problem, RecipeError, RunInterruptedError
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS
from areal_hpc.jobs.processes.signals import StopEvent
from areal_hpc.launch import slurm_launcher, submitted_run_watch
from areal_hpc.launch.evaluation.target import EvaluationTarget, find_target
from areal_hpc.launch.foreground_launcher import ForegroundLauncher
from areal_hpc.launch.plan import (
    MAX_CONSECUTIVE_SERVICE_RESTARTS,
    JobStage,
    PlanInputs,
    plan_cell_job,
)
from areal_hpc.launch.prepared_run import StagePlanner, prepare_and_lock_run
from areal_hpc.launch.resources.gpu_assignment import find_gpu_problems
from areal_hpc.launch.this_machine import ThisMachine
from areal_hpc.ledger.config import LedgerJobConfig
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir.manifests import read_evaluation
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, LEDGER_SERVICE
from areal_hpc.view.evaluation_report import EvaluationReport, build_report_of_run_step
from areal_hpc.view.state.live_progress import EvaluationReporter
from areal_hpc.wire.weight_version import WeightVersion

LOADED_VERSION = str(WeightVersion(0, STEP_OF_LOADED_WEIGHTS))
"""Version of the weights that replicas load: of no generation, as no trainer made them here."""


def build_evaluation_planner(sets: Sequence[EvaluationSet]) -> StagePlanner:
    return partial(plan_evaluation, set_names={one.name for one in sets})


def plan_evaluation(
    recipe: Recipe, paths: RunPaths, plan_inputs: PlanInputs | None, set_names: Collection[str]
) -> tuple[JobStage, ...]:
    """The job `evaluation`: a cell that serves what it loads, and the ledger on its first task."""
    if plan_inputs is None:
        plan_inputs = PlanInputs(1, {}, "python", ())
    sets = [
        one
        for one in recipe.evaluation_sets
        if one.name in set_names and plan_inputs.tasks_by_evaluation_set.get(one.name)
    ]
    known = {one.name: plan_inputs.tasks_by_evaluation_set[one.name] for one in sets}
    ledger = LedgerJobConfig(
        run_dir=paths.root,
        n_train_tasks=1,
        tasks_by_evaluation_set=known,
        evaluates={one.name: min(one.tasks, known[one.name]) for one in sets},
    ).build_process_spec(LEDGER_SERVICE, tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS)
    job = plan_cell_job(recipe, paths, plan_inputs, EVALUATION_CELL, ("valid",), LOADED_VERSION)
    # The agents' Python: there is no trainer, and its environment need not be there.
    processes = [replace(ledger, role="agents"), *job.processes]
    stage = JobStage(
        EVALUATION_CELL,
        replace(job, processes=processes),
        (),
        paths.finished_marker,
        paths.evaluated_tickets(STEP_OF_LOADED_WEIGHTS),
    )
    return (stage,)


def choose_sets(recipe: Recipe, names: Sequence[str]) -> list[EvaluationSet]:
    known = {one.name: one for one in recipe.evaluation_sets}
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(
            f"the recipe has no evaluation set {unknown[0]}",
            key="--set",
            hint=f"choose from {', '.join(known)}" if known else "add one to evaluation.sets",
        )
    if not known:
        hint = "set valid_dataset, or add a set to evaluation.sets"
        raise RecipeError("the recipe has no evaluation set", key="evaluation.sets", hint=hint)
    return [one for name, one in known.items() if not names or name in names]


def raise_if_results_of_other_settings(
    target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> None:
    """Demand that what the evaluation's directory holds is of this model, played in this way.

    Raises:
        RecipeError: It is of another model, or a set was played by other settings.
    """
    if not target.paths.recipe.exists():
        return
    recorded = load_recipe(target.paths.recipe)
    played = {one.name: one for one in recorded.evaluation_sets}
    hint = f"set another trial_name, or remove {target.paths.root}"
    problems = []
    if recorded.model.path != target.recipe.model.path:
        message = f"the results there are of {recorded.model.path}, not of {target.model}"
        problems.append(Problem(message, "model.path", hint))
    for one in sets:
        before = played.get(one.name, one)
        for key in ("n_samples", "sampling", "workflow", "workflow_kwargs"):
            old, new = getattr(before, key), getattr(one, key)
            if old != new:
                is_private = key == "workflow_kwargs"  # it may hold keys of services
                difference = "other arguments" if is_private else f"{old!r}, got {new!r}"
                message = f"set {one.name} was played with {difference}"
                problems.append(Problem(message, f"evaluation.{key}", hint))
    if problems:
        raise RecipeError.from_problems(problems)


def list_sets_without_full_result(
    target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> list[str]:
    """Names of the sets without a result, or with one of fewer tasks than are asked for."""
    missing = []
    for one in sets:
        tasks = target.paths.evaluation_tasks(one.name)
        result = read_evaluation(target.paths, STEP_OF_LOADED_WEIGHTS, one.name)
        there = count_materialized_rows(tasks) if result else 0
        if result is None or result.n_tasks != min(one.tasks, there):
            missing.append(one.name)
    return missing


def find_report_of_step(
    target: EvaluationTarget, step: int, sets: Sequence[EvaluationSet]
) -> EvaluationReport:
    """What is known of another step of the run: by an evaluation of its own, or from training.

    Its own lies beside that of the target. Training may have evaluated a step whose checkpoint is
    gone.

    Raises:
        RecipeError: Nothing is, or what is evaluated is no checkpoint of a run.
    """
    if (run := target.run) is None:
        message = "a step of which run? What is evaluated is a model"
        raise RecipeError(message, key="--compare", hint="give a file of results")
    metrics = {one.name: (one.metrics, one.pass_reward) for one in sets}
    found = build_report_of_run_step(run, step, metrics).sets
    try:
        own = find_target(run.root, step=step, recipe=None).paths
    except RecipeError:
        if not found:
            raise
    else:
        beside = RunPaths(target.paths.root.with_name(own.root.name))
        found = found | build_report_of_run_step(beside, STEP_OF_LOADED_WEIGHTS, metrics).sets
    if found:
        return EvaluationReport("", str(run.root), step, found)
    raise RecipeError(
        f"the weights of step {step} were not evaluated on {', '.join(metrics)}",
        key="--compare",
        hint=f"areal-hpc eval {shlex.quote(str(run.root))} --step {step}",
    )


def build_evaluation_report(
    target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> EvaluationReport:
    metrics = {one.name: (one.metrics, one.pass_reward) for one in sets}
    found = build_report_of_run_step(target.paths, STEP_OF_LOADED_WEIGHTS, metrics).sets
    run = str(target.run.root) if target.run is not None else ""
    return EvaluationReport(str(target.model), run, target.step, found)


def run_evaluation(
    target: EvaluationTarget, sets: Sequence[EvaluationSet], stop: StopEvent
) -> None:
    recipe, plan = target.recipe, build_evaluation_planner(sets)
    reporter = EvaluationReporter(target.paths, sets)
    target.export_checkpoint_and_link_tasks(reporter.print_line)
    with prepare_and_lock_run(
        recipe,
        print_line=reporter.print_line,
        known_problems=find_gpu_problems(recipe, os.environ, plan(recipe, target.paths, None)),
        plan=plan,
    ) as ready:
        if stop.is_set():
            raise RunInterruptedError
        place = ThisMachine(recipe, ready)
        ForegroundLauncher(recipe, ready, reporter, stop, place).run_stage_jobs(
            ready.remaining_stages[0]
        )


def submit_evaluation(
    target: EvaluationTarget,
    sets: Sequence[EvaluationSet],
    *,
    print_line: Callable[[str], None],
    wait_until: StopEvent | None = None,
) -> None:
    plan = build_evaluation_planner(sets)
    target.export_checkpoint_and_link_tasks(print_line)
    slurm_launcher.submit(target.recipe, print_line=print_line, plan=plan)
    if wait_until is not None:
        reporter = EvaluationReporter(target.paths, sets)
        submitted_run_watch.watch_submitted_run(
            target.recipe, target.paths, reporter, wait_until, plan=plan
        )

"""Evaluation of a model directory or of a run's checkpoint without a trainer (`areal-hpc eval`).

It is one job, here or under Slurm: a cell that serves the weights that it loads, and a ledger that
starts the evaluation itself.
"""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace
from omegaconf import OmegaConf

from areal_hpc.dataset.sources import count_materialized_rows
from areal_hpc.errors import ClusterError, Problem, RecipeError
from areal_hpc.evaluation.set_names import STEP_OF_LOADED_WEIGHTS
from areal_hpc.jobs.config import get_interpreter
from areal_hpc.jobs.processes.process_setup import StopEvent
from areal_hpc.launch import foreground_launcher, slurm_launcher
from areal_hpc.launch.plan import (
    MAX_CONSECUTIVE_SERVICE_RESTARTS,
    JobStage,
    PlanInputs,
    StagePlanner,
    get_initial_policy_path,
    plan_cell_job,
)
from areal_hpc.launch.run import watch_submitted_run
from areal_hpc.ledger.config import LedgerJobConfig
from areal_hpc.recipe.keys import flatten_keys
from areal_hpc.recipe.loading import load_recipe, read_site_file
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.evaluation import EvaluationSet
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.files import restrict_new_files, secure_run_dir
from areal_hpc.rundir.manifests import read_evaluation
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.rundir.rendezvous import EVALUATION_CELL, LEDGER_SERVICE
from areal_hpc.view.evaluation_report import (
    EvaluatedSet,
    EvaluationReport,
    build_step_report,
    check_comparable,
    compute_tasks_digest,
)
from areal_hpc.view.state.live_progress import EvaluationReporter
from areal_hpc.wire.weight_version import WeightVersion

MODEL_CONFIG_FILE = "config.json"
_ONE_CELL_OVERRIDES = (
    "sft=null",
    "inference.cells=1",
    "evaluation.separate_cell=false",
    "evaluation.keep_best=''",
)
"""Overrides that reduce a run to an evaluation: one cell, and no training."""


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    recipe: Recipe
    """Recipe whose run directory is that of the evaluation."""
    model: Path
    """Model in Hugging Face format; `prepare_inputs` exports it from a checkpoint."""
    run: RunPaths | None = None
    step: int | None = None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.recipe.run_dir.resolve())

    def prepare_inputs(self, print_line: Callable[[str], None]) -> None:
        if self.run is None:
            return
        readers = self.recipe.cluster.readable_by
        with restrict_new_files(readers):
            secure_run_dir(self.paths.root, readers)
            _link_tasks(self.run, self.recipe, self.paths)
            if not self.model.exists():
                _export_checkpoint(self.run, self.step, self.model, self.recipe, print_line)


def find_target(
    run_or_model_dir: Path,
    *,
    step: int | None,
    recipe: Path | None,
    overrides: Sequence[str] = (),
    site: Path | None = None,
) -> EvaluationTarget:
    """Find the target in a directory: a run, or a model with a `recipe` for evaluating it.

    Raises:
        RecipeError: There is neither, the run has no such checkpoint, or a recipe is missing.
    """
    run = RunPaths(run_or_model_dir.resolve())
    if run.recipe.exists():
        if recipe is not None:
            raise RecipeError("a run has its own recipe", key="--recipe", hint="give key=value")
        return _find_target_in_run(run, step, overrides, site)
    if not (run_or_model_dir / MODEL_CONFIG_FILE).is_file():
        raise RecipeError(
            f"there is no run and no model at {run_or_model_dir}",
            hint=f"give a run directory, or a model's, which has a {MODEL_CONFIG_FILE}",
        )
    if recipe is None or step is not None:
        key = "--step" if recipe is not None else "--recipe"
        message = "a model has no steps" if recipe is not None else "a model needs a recipe"
        raise RecipeError(
            message, key=key, hint=f"areal-hpc eval {run_or_model_dir} --recipe RECIPE.yaml"
        )
    model = run_or_model_dir.resolve()
    trial = "eval-" + re.sub(r"[^A-Za-z0-9_.-]", "-", model.name)
    all_overrides = [
        f"trial_name={trial}",
        *overrides,
        *_ONE_CELL_OVERRIDES,
        f"model.path={json.dumps(str(model))}",
    ]
    return EvaluationTarget(load_recipe(recipe, all_overrides, site), model)


def _find_target_in_run(
    run: RunPaths, step: int | None, overrides: Sequence[str], site: Path | None
) -> EvaluationTarget:
    recorded = load_recipe(run.recipe)
    if recorded.train_dataset is None and step is None:
        step = 0  # what SFT alone has trained
    version = choose_version(run, step)
    directory_overrides = [
        f"cluster.fileroot={json.dumps(str(run.eval_command_runs_dir))}",
        f"trial_name={recorded.trial_name}-{version}",
    ]
    site_overrides = []
    if site is not None:  # the recorded recipe holds every key, so the site's must override it
        keys = flatten_keys(OmegaConf.to_container(read_site_file(site)))
        site_overrides = [f"cluster.{key}={json.dumps(value)}" for key, value in keys.items()]
    all_overrides = [*site_overrides, *directory_overrides, *overrides, *_ONE_CELL_OVERRIDES]
    start = get_initial_policy_path(recorded, run).resolve()
    recipe = load_recipe(run.recipe, [*all_overrides, f"model.path={json.dumps(str(start))}"])
    if version.step == 0:
        return EvaluationTarget(recipe, start, run, version.step)
    model = RunPaths(recipe.run_dir.resolve()).export_dir(format_step_dir(version.step))
    recipe = load_recipe(run.recipe, [*all_overrides, f"model.path={json.dumps(str(model))}"])
    return EvaluationTarget(recipe, model, run, version.step)


def choose_version(run: RunPaths, step: int | None) -> WeightVersion:
    """Return the version of a step, or of the newest checkpoint; step 0 is the initial model."""
    if step == 0:
        return WeightVersion(0, 0)
    states = [checkpoint.state for checkpoint in list_checkpoints(run.checkpoints_dir)]
    matches = [state for state in states if step in (None, state.step)]
    if matches:
        return WeightVersion(matches[-1].generation, matches[-1].step)
    available = ", ".join(map(str, (0, *(state.step for state in states))))
    raise RecipeError(
        f"there is no checkpoint of step {step}" if states else "the run has no checkpoint yet",
        key=str(run.checkpoints_dir),
        hint=f"--step takes one of {available}; 0 is the model that the run started from",
    )


def _link_tasks(run: RunPaths, recipe: Recipe, paths: RunPaths) -> None:
    recorded_sets = load_recipe(run.recipe).evaluation_sets
    recorded = {recorded_set.name: recorded_set.dataset for recorded_set in recorded_sets}
    files = [run.dataset("train"), run.train_source_sizes]
    for wanted in recipe.evaluation_sets:
        if recorded.get(wanted.name) == wanted.dataset:
            files.append(run.evaluation_tasks(wanted.name))
    paths.data_dir.mkdir(exist_ok=True)
    for file in files:
        link = paths.data_dir / file.name
        if file.exists() and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(file)


def _export_checkpoint(
    run: RunPaths, step: int | None, target: Path, recipe: Recipe, print_line: Callable[[str], None]
) -> None:
    print_line(f"export   step {step} to {target}")
    python = get_interpreter("train", recipe.cluster.train.python)
    command = [python, "-m", "areal_hpc", "export", str(run.root)]
    export = subprocess.run(
        [*command, "--step", str(step), "--out", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if export.returncode:
        raise ClusterError(
            f"the checkpoint of step {step} could not be exported: {export.stderr.strip()[-800:]}",
            key=str(run.checkpoints_dir),
            hint="areal-hpc export shows the whole error",
        )


LOADED_VERSION = str(WeightVersion(0, STEP_OF_LOADED_WEIGHTS))
"""Version of the weights that replicas load; generation 0: no trainer made them here."""


def build_evaluation_planner(
    sets: Sequence[EvaluationSet], before: EvaluationReport | None
) -> StagePlanner:
    names = {wanted.name for wanted in sets}
    return partial(plan_evaluation, set_names=names, before=before)


def plan_evaluation(
    recipe: Recipe,
    paths: RunPaths,
    plan_inputs: PlanInputs | None,
    set_names: Collection[str],
    before: EvaluationReport | None,
) -> tuple[JobStage, ...]:
    """Plan the job `evaluation`: a cell, and the ledger on its first task.

    Raises:
        RecipeError: The results could not be compared with those of `before`.
    """
    if plan_inputs is None:
        plan_inputs = PlanInputs(1, {}, "python", ())
    sets = [
        evaluation_set
        for evaluation_set in recipe.evaluation_sets
        if evaluation_set.name in set_names
        and plan_inputs.tasks_by_evaluation_set.get(evaluation_set.name)
    ]
    task_counts = {wanted.name: plan_inputs.tasks_by_evaluation_set[wanted.name] for wanted in sets}
    played_counts = {wanted.name: min(wanted.tasks, task_counts[wanted.name]) for wanted in sets}
    if before is not None and sets:
        planned = {
            wanted.name: EvaluatedSet(
                compute_tasks_digest(paths.evaluation_tasks(wanted.name), n_played),
                metrics={},
                samples=[[]] * n_played,
                pass_reward=wanted.pass_reward,
            )
            for wanted, n_played in zip(sets, played_counts.values(), strict=True)
        }
        check_comparable(before, EvaluationReport("", sets=planned))
    ledger = LedgerJobConfig(
        run_dir=paths.root,
        n_train_tasks=1,
        tasks_by_evaluation_set=task_counts,
        evaluates=played_counts,
    ).build_process_spec(LEDGER_SERVICE, tasks="first", restarts=MAX_CONSECUTIVE_SERVICE_RESTARTS)
    job = plan_cell_job(recipe, paths, plan_inputs, EVALUATION_CELL, ("valid",), LOADED_VERSION)
    # The agents' Python: without a trainer its environment may be missing.
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
    sets = {named_set.name: named_set for named_set in recipe.evaluation_sets}
    if unknown := [name for name in names if name not in sets]:
        raise RecipeError(
            f"the recipe has no evaluation set {unknown[0]}",
            key="--set",
            hint=f"choose from {', '.join(sets)}" if sets else "add one to evaluation.sets",
        )
    if not sets:
        hint = "set valid_dataset, or add a set to evaluation.sets"
        raise RecipeError("the recipe has no evaluation set", key="evaluation.sets", hint=hint)
    return [named_set for name, named_set in sets.items() if not names or name in names]


def check_recorded_settings(target: EvaluationTarget, sets: Sequence[EvaluationSet]) -> None:
    """Check that the results in the evaluation's directory used this model and these settings.

    Raises:
        RecipeError: They are of another model, or a set was played with other settings.
    """
    if not target.paths.recipe.exists():
        return
    recorded = load_recipe(target.paths.recipe)
    recorded_sets = {played.name: played for played in recorded.evaluation_sets}
    hint = f"set another trial_name, or remove {target.paths.root}"
    problems = []
    if recorded.model.path != target.recipe.model.path:
        message = f"the results there are of {recorded.model.path}, not of {target.model}"
        problems.append(Problem(message, "model.path", hint))
    for wanted in sets:
        before = recorded_sets.get(wanted.name, wanted)
        for key in ("n_samples", "sampling", "workflow", "workflow_kwargs"):
            old, new = getattr(before, key), getattr(wanted, key)
            if old != new:
                is_private = key == "workflow_kwargs"  # it may hold keys of services
                difference = "other arguments" if is_private else f"{old!r}, got {new!r}"
                message = f"set {wanted.name} was played with {difference}"
                problems.append(Problem(message, f"evaluation.{key}", hint))
    if problems:
        raise RecipeError.from_problems(problems)


def list_unfinished_sets(target: EvaluationTarget, sets: Sequence[EvaluationSet]) -> list[str]:
    """Return the names of the sets without a result, or whose result has too few tasks."""
    unfinished = []
    for wanted in sets:
        tasks = target.paths.evaluation_tasks(wanted.name)
        result = read_evaluation(target.paths, STEP_OF_LOADED_WEIGHTS, wanted.name)
        available = count_materialized_rows(tasks) if result else 0
        if result is None or result.n_tasks != min(wanted.tasks, available):
            unfinished.append(wanted.name)
    return unfinished


def find_report_of_step(
    target: EvaluationTarget, step: int, sets: Sequence[EvaluationSet]
) -> EvaluationReport:
    """Find results of another step of the run, from its own evaluation or from training.

    Its own evaluation is in a folder beside the target's. Training may have evaluated a step whose
    checkpoint is gone.

    Raises:
        RecipeError: There are none, or the target is no checkpoint of a run.
    """
    if (run := target.run) is None:
        message = "the target is a model, which has no steps"
        raise RecipeError(message, key="--compare", hint="give a file of results")
    metrics = {wanted.name: (wanted.metrics, wanted.pass_reward) for wanted in sets}
    results = build_step_report(run, step, metrics).sets
    try:
        own = find_target(run.root, step=step, recipe=None).paths
    except RecipeError:
        if not results:
            raise
    else:
        beside = RunPaths(target.paths.root.with_name(own.root.name))
        results = results | build_step_report(beside, STEP_OF_LOADED_WEIGHTS, metrics).sets
    if results:
        return EvaluationReport("", str(run.root), step, results)
    raise RecipeError(
        f"the weights of step {step} were not evaluated on {', '.join(metrics)}",
        key="--compare",
        hint=f"areal-hpc eval {shlex.quote(str(run.root))} --step {step}",
    )


def build_evaluation_report(
    target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> EvaluationReport:
    metrics = {wanted.name: (wanted.metrics, wanted.pass_reward) for wanted in sets}
    results = build_step_report(target.paths, STEP_OF_LOADED_WEIGHTS, metrics).sets
    run = str(target.run.root) if target.run is not None else ""
    return EvaluationReport(str(target.model), run, target.step, results)


def run_evaluation(
    target: EvaluationTarget,
    sets: Sequence[EvaluationSet],
    stop: StopEvent,
    before: EvaluationReport | None,
) -> None:
    reporter = EvaluationReporter(target.paths, sets)
    target.prepare_inputs(reporter.print_line)
    plan = build_evaluation_planner(sets, before)
    foreground_launcher.run(target.recipe, reporter=reporter, stop=stop, plan=plan)


def submit_evaluation(
    target: EvaluationTarget,
    sets: Sequence[EvaluationSet],
    *,
    print_line: Callable[[str], None],
    wait_until: StopEvent | None,
    before: EvaluationReport | None,
) -> None:
    plan = build_evaluation_planner(sets, before)
    target.prepare_inputs(print_line)
    slurm_launcher.submit(target.recipe, print_line=print_line, plan=plan)
    if wait_until is not None:
        reporter = EvaluationReporter(target.paths, sets)
        watch_submitted_run(target.recipe, target.paths, reporter, wait_until, plan=plan)

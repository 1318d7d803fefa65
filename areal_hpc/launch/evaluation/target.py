"""What `areal-hpc eval` evaluates: a model directory, or a checkpoint of a run; and its recipe."""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.jobs.environment import get_interpreter
from areal_hpc.launch.plan import get_initial_policy_path
from areal_hpc.recipe.keys import flatten_keys
from areal_hpc.recipe.loading import load_recipe, read_site_file
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.checkpoints import list_checkpoints
from areal_hpc.rundir.folders import create_or_secure_run_dir, restrict_new_files
from areal_hpc.rundir.paths import RunPaths, format_step_dir
from areal_hpc.wire.weight_version import WeightVersion

MODEL_CONFIG_FILE = "config.json"
_ONE_CELL_OVERRIDES = (
    "sft=null",
    "inference.cells=1",
    "evaluation.separate_cell=false",
    "evaluation.keep_best=''",
)
"""What an evaluation has of a run: one cell, and no training."""


@dataclass(frozen=True, slots=True)
class EvaluationTarget:
    recipe: Recipe
    """Its run directory is that of the evaluation."""
    model: Path
    """In Hugging Face format; `export_checkpoint_and_link_tasks` writes that of a checkpoint."""
    run: RunPaths | None = None
    step: int | None = None

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.recipe.run_dir.resolve())

    def export_checkpoint_and_link_tasks(self, print_line: Callable[[str], None]) -> None:
        if self.run is None:
            return
        readers = self.recipe.cluster.readable_by
        with restrict_new_files(readers):
            create_or_secure_run_dir(self.paths.root, readers)
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
    """What a directory holds: a run, or a model that a `recipe` says how to evaluate.

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
        message = "a model has no steps" if recipe is not None else "no recipe says how to play it"
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
    version = choose_version(run, step)
    places = [
        f"cluster.fileroot={json.dumps(str(run.eval_command_runs_dir))}",
        f"trial_name={recorded.trial_name}-{version}",
    ]
    sited = []
    if site is not None:  # the recorded recipe holds every key, so they have to win over it
        keys = flatten_keys(OmegaConf.to_container(read_site_file(site)))
        sited = [f"cluster.{key}={json.dumps(value)}" for key, value in keys.items()]
    all_overrides = [*sited, *places, *overrides, *_ONE_CELL_OVERRIDES]
    start = get_initial_policy_path(recorded, run).resolve()
    recipe = load_recipe(run.recipe, [*all_overrides, f"model.path={json.dumps(str(start))}"])
    if version.step == 0:
        return EvaluationTarget(recipe, start, run, version.step)
    model = RunPaths(recipe.run_dir.resolve()).export_dir(format_step_dir(version.step))
    recipe = load_recipe(run.recipe, [*all_overrides, f"model.path={json.dumps(str(model))}"])
    return EvaluationTarget(recipe, model, run, version.step)


def choose_version(run: RunPaths, step: int | None) -> WeightVersion:
    """The weights to evaluate: of the newest checkpoint unless one is asked for; 0 is the start.

    Raises:
        RecipeError: The run has no checkpoint of that step.
    """
    if step == 0:
        return WeightVersion(0, 0)
    states = [one.state for one in list_checkpoints(run.checkpoints_dir)]
    chosen = [one for one in states if step in (None, one.step)]
    if chosen:
        return WeightVersion(chosen[-1].generation, chosen[-1].step)
    held = ", ".join(map(str, (0, *(one.step for one in states))))
    raise RecipeError(
        f"there is no checkpoint of step {step}" if states else "the run has no checkpoint yet",
        key=str(run.checkpoints_dir),
        hint=f"--step takes one of {held}; 0 is the model that the run started from",
    )


def _link_tasks(run: RunPaths, recipe: Recipe, paths: RunPaths) -> None:
    recorded = {one.name: one.dataset for one in load_recipe(run.recipe).evaluation_sets}
    files = [run.dataset("train"), run.train_source_sizes]
    for one in recipe.evaluation_sets:
        if recorded.get(one.name) == one.dataset:
            files.append(run.evaluation_tasks(one.name))
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
    ended = subprocess.run(
        [*command, "--step", str(step), "--out", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise ClusterError(
            f"the checkpoint of step {step} could not be exported: {ended.stderr.strip()[-800:]}",
            key=str(run.checkpoints_dir),
            hint="areal-hpc export tells more",
        )

"""Set-up of a run directory: task sets, model, recipe."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.dataset.materialize import count_materialized_rows, materialize_task_sets
from areal_hpc.errors import Problem, RecipeError
from areal_hpc.launch.plan import PlanInputs
from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.recipe.hub_cache import find_snapshot
from areal_hpc.recipe.keys import flatten_keys, flatten_keys_hiding_private_values
from areal_hpc.recipe.private_values import hide_private_values_equal_in
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.trainer import compute_learning_rate
from areal_hpc.rollout.episodes.episode_spec import check_task_limits
from areal_hpc.rundir.atomic import write_atomic, write_atomic_private
from areal_hpc.rundir.checkpoints import find_latest_checkpoint
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rendezvous import ensure_admin_key, ensure_service_key

MAX_TOKENIZER_TRAINING_ROWS = 2000
"""Demonstrations the tiny model's tokenizer is trained on."""
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
"""Keys that what is already recorded depends on: a run keeps them for life."""
KEYS_WITHOUT_EFFECT_ON_TRAINED_MODEL = ("cluster", "trainer.total_steps")
"""Keys that may differ from those of a finished run: they change nothing of what was trained."""

ABSOLUTE_PATH_KEYS = (
    "model.path",
    "trainer.objective.kl.reference",
    "trainer.objective.teacher.path",
    "trainer.objective.teacher.api_key_file",
    "trainer.objective.critic.model",
)
"""Keys of models, and of a file with a key: a path in them is absolute in a run's recipe."""


def write_run_inputs_and_keys(
    recipe: Recipe,
    paths: RunPaths,
    print_line: Callable[[str], None],
    serve_python: str,
    sys_path: tuple[str, ...],
) -> PlanInputs:
    """Put task sets, the starting model and the secret in place; what exists is kept."""
    for folder in sys_path:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    train, sft = (paths.dataset(name) for name in ("train", "sft"))
    check = partial(check_task_limits, recipe.rollout, recipe.proxy.session_timeout_s)
    sources, train_source_sizes = recipe.train_dataset.sources, paths.train_source_sizes
    if not train.exists() or (sources and not train_source_sizes.exists()):
        print_line("data     writing the train set")
        counts = materialize_task_sets(
            recipe.train_dataset.list_sources("train_dataset"), train, check
        )
        if sources:
            write_atomic(train_source_sizes, json.dumps(counts).encode())
    for one in recipe.evaluation_sets:
        held_out = paths.evaluation_tasks(one.name)
        if not held_out.exists():
            print_line(f"data     writing the {one.name} set")
            materialize_task_sets([(one.dataset, one.dataset_key)], held_out, check)
    if recipe.sft is not None and not sft.exists():
        print_line("data     writing the SFT set")
        materialize_task_sets([(recipe.sft.dataset, "sft.dataset")], sft)
    if recipe.model.tiny is not None and not (paths.starting_model_dir / "config.json").exists():
        print_line("model    making a tiny Qwen3 and its tokenizer")
        sizes = recipe.model.tiny.model_dump()
        make_tiny_model(
            paths.starting_model_dir, _read_tokenizer_texts(sft), seed=recipe.seed, **sizes
        )
    if recipe.model.hub is not None and not paths.starting_model_dir.exists():
        paths.starting_model_dir.unlink(missing_ok=True)  # a link to a cache that has gone
        cached = find_snapshot(recipe.model.hub, "model", "model.hub")
        paths.starting_model_dir.symlink_to(cached)
    ensure_admin_key(paths.admin_key)
    ensure_service_key(paths.service_key)
    return PlanInputs(
        train_tasks=count_materialized_rows(train),
        tasks_by_evaluation_set={
            one.name: count_materialized_rows(paths.evaluation_tasks(one.name))
            for one in recipe.evaluation_sets
        },
        serve_python=serve_python,
        sys_path=sys_path,
        tasks_of_sources=json.loads(train_source_sizes.read_text()) if sources else (),
    )


def _read_tokenizer_texts(demonstrations: Path) -> Iterator[str]:
    with demonstrations.open() as stream:
        for _, line in zip(range(MAX_TOKENIZER_TRAINING_ROWS), stream, strict=False):
            for message in json.loads(line)["messages"]:
                yield message["content"]


def create_attempt_log_dir_and_link_latest(paths: RunPaths) -> int:
    """Make the next log folder and point `latest` to it."""
    attempt = max(paths.list_attempts(), default=0) + 1
    paths.log_dir(attempt).mkdir(parents=True)
    paths.latest_log.unlink(missing_ok=True)
    paths.latest_log.symlink_to(paths.log_dir(attempt).name)
    return attempt


def report_or_refuse_recipe_changes(
    recipe: Recipe, paths: RunPaths, print_line: Callable[[str], None]
) -> None:
    """Tell what differs from the recipe this run was started with.

    Raises:
        RecipeError: A key differs that recorded data depends on.
    """
    if not paths.recipe.exists():
        return
    before, now, changed = _compare_with_launched_recipe(recipe, paths)
    problems = [
        Problem(
            f"{key} cannot change: this run was started with {before.get(key)!r}, "
            f"got {now.get(key)!r}",
            key,
            "use another trial_name, or --fresh to start over",
        )
        for key in changed
        if is_key_at_or_below(key, IMMUTABLE_RECIPE_KEYS)
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


def refuse_other_recipe_of_finished_run(recipe: Recipe, paths: RunPaths) -> None:
    """Demand that a finished run was trained by this recipe: it will not be trained again.

    Raises:
        RecipeError: Keys differ that its training depended on; all of them at once.
    """
    before, now, changed = _compare_with_launched_recipe(recipe, paths)
    problems = [
        Problem(
            f"the run in {paths.root} is finished, and it was trained with {key}="
            f"{before[key]!r}, got {now[key]!r}",
            key,
            "use another trial_name, ask for more trainer.total_steps, or --fresh to start over",
        )
        for key in changed
        if key in before
        and key in now  # keys of other versions are not the user's
        and not is_key_at_or_below(key, KEYS_WITHOUT_EFFECT_ON_TRAINED_MODEL)
    ]
    if problems:
        raise RecipeError.from_problems(problems)


def _compare_with_launched_recipe(
    recipe: Recipe, paths: RunPaths
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Keys of the recipe that a run was last launched with, those of another, the unlike ones.

    Values that may be secrets are compared, and hidden in what is returned.
    """
    trees = yaml.safe_load(paths.recipe.read_text()), _dump_with_absolute_paths(recipe)
    before, now = map(flatten_keys, trees)
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    return (
        flatten_keys_hiding_private_values(trees[0]),
        flatten_keys_hiding_private_values(trees[1]),
        changed,
    )


def _dump_with_absolute_paths(recipe: Recipe) -> dict[str, Any]:
    tree = recipe.model_dump(mode="json")
    values = flatten_keys(recipe.model_dump())
    for key in ABSOLUTE_PATH_KEYS:
        if isinstance(path := values.get(key), Path):
            *sections, last = key.split(".")
            reduce(dict.__getitem__, sections, tree)[last] = str(path.absolute())
    return tree


def is_key_at_or_below(key: str, known_keys: Sequence[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in known_keys)


def write_recipe_and_keep_replaced(
    recipe: Recipe, path: Path, replaced: Path | None = None
) -> None:
    """Write a resolved recipe, for its owner alone; another one there is kept as `replaced`.

    Values that may be secrets are in one file alone: where both have the same, in the new one.
    Relative paths of models begin in the folder of the launch, which later commands do not know.
    """
    tree = _dump_with_absolute_paths(recipe)
    text = yaml.safe_dump(tree, sort_keys=False)
    if replaced is not None and path.exists() and path.read_text() != text:
        before = hide_private_values_equal_in(yaml.safe_load(path.read_text()), tree)
        write_atomic_private(replaced, yaml.safe_dump(before, sort_keys=False).encode())
    # Variables and agent arguments may hold keys of other services.
    write_atomic_private(path, text.encode())

"""A copy of a run's folder, made a run of its own."""

import json
import re
import shutil

from areal_hpc.errors import RecipeError
from areal_hpc.launch.run_dir_setup import write_recipe_and_keep_replaced
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.paths import RunPaths


def make_run_of_copy(paths: RunPaths, trial_name: str) -> RunPaths:
    """Give a copy a name beside it, without jobs, addresses and keys of the run that it is of.

    Shards, manifests and checkpoints stay: the run goes on from its last checkpoint.

    Raises:
        RecipeError: The folder is no copy, or the name is taken or none.
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
    # The recipe is written last: until then the folder is a copy, and the command can be repeated.
    for folder in (target.jobs_dir, target.rendezvous_dir, target.trackers_dir):
        if folder.exists():
            shutil.rmtree(folder)
    for file in (target.cancelled_marker, target.submission_claim):
        file.unlink(missing_ok=True)
    place = {
        "cluster.fileroot": str(target.root.parents[1]),
        "experiment_name": target.root.parent.name,
        "trial_name": trial_name,
    }
    recipe = load_recipe(
        target.recipe, [f"{key}={json.dumps(text)}" for key, text in place.items()]
    )
    write_recipe_and_keep_replaced(recipe, target.recipe)
    return target

"""The recipe that processes of a made-up run read."""

from typing import Any

import yaml

from areal_hpc.rundir.paths import RunPaths


def write_role_recipe(paths: RunPaths, **sections: Any) -> None:
    """The least recipe there is, with other values of some sections."""
    tree: dict[str, Any] = {
        "experiment_name": "tiny",
        "trial_name": "run",
        "cluster": {"fileroot": str(paths.root.parent)},
        "model": {"path": str(paths.starting_model_dir)},
        "train_dataset": {"path": "tasks.jsonl"},
        "rollout": {},
        "trainer": {"device": "cpu", "dtype": "float32", **sections.pop("trainer", {})},
    }
    paths.recipe.parent.mkdir(parents=True, exist_ok=True)
    paths.recipe.write_text(yaml.safe_dump(tree | sections))

"""Values of a recipe that may be secrets: recipe.yaml alone holds them, for its owner alone.

Job specifications and configurations of processes name the recipe's keys in their place; the
process that needs a value reads it when it starts.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.rundir.jobs import RECIPE_REFERENCES_KEY
from areal_hpc.rundir.paths import RunPaths

_PRIVATE_KEY_PATTERN = re.compile(r"(^|\.)(variables|workflow_kwargs)(\.|$)")
_PRIVATE_WORD_PATTERN = re.compile(r"(?<!\w)(variables|workflow_kwargs)(?!\w)")
_HIDDEN_VALUE_TEXT = "(in recipe.yaml)"


def replace_private_values_by_references(
    config: Mapping[str, Any], keys: Mapping[str, str]
) -> dict[str, Any]:
    """A configuration with the recipe's keys in place of values; `keys` by place in it.

    Both are dotted. Places that are empty stay as they are.
    """
    changed = copy.deepcopy(dict(config))
    references = {}
    for place, key in keys.items():
        parent, name = _find_parent(changed, place)
        if parent.get(name):
            del parent[name]
            references[place] = key
    return changed | ({RECIPE_REFERENCES_KEY: references} if references else {})


def fill_in_private_values_from_recipe(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the values of its run's recipe in place."""
    references: Mapping[str, str] = config.pop(RECIPE_REFERENCES_KEY, {})
    if references:
        recipe = _read_recipe(RunPaths(Path(config["run_dir"])).recipe)
        for place, key in references.items():
            parent, name = _find_parent(config, place)
            holder, last = _find_parent(recipe, key)
            parent[name] = holder[last]
    return config


def read_role_variables(recipe: Path, role: str) -> dict[str, str]:
    """Variables that a run's recipe gives to the processes of a role."""
    variables: dict[str, str] = _read_recipe(recipe)["cluster"][role].get("variables", {})
    return variables


def hide_private_values_equal_in(tree: Any, kept: Any, key: str = "") -> Any:
    """A recipe without the private values that it shares with the one that is kept."""
    if isinstance(tree, Mapping):
        others = kept if isinstance(kept, Mapping) else {}
        return {
            name: hide_private_values_equal_in(value, others.get(name), f"{key}.{name}")
            for name, value in tree.items()
        }
    return _HIDDEN_VALUE_TEXT if tree == kept and _PRIVATE_KEY_PATTERN.search(key) else tree


def hide_private_arguments(arguments: list[str]) -> Iterator[str]:
    """A command line without the private values among its overrides.

    A key may be written as `cluster.agents[variables]`, or stand in the value of a section:
    `cluster.agents={variables: ...}`.
    """
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        is_private = bool(equals) and _PRIVATE_WORD_PATTERN.search(argument) is not None
        yield f"{key}={_HIDDEN_VALUE_TEXT}" if is_private else argument


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ClusterError(
            f"the run's recipe cannot be read: {error.strerror}",
            key=str(path),
            hint="check that its owner runs this, and that the file system is mounted",
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise RecipeError(
            f"the run's recipe cannot be read: {' '.join(str(error).split())}",
            key=str(path),
            hint="restore the file from a backup",
        ) from error
    return tree


def _find_parent(tree: dict[str, Any], dotted_key: str) -> tuple[dict[str, Any], str]:
    *parts, last = dotted_key.split(".")
    for part in parts:
        tree = tree[part]
    return tree, last

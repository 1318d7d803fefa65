"""Values of a recipe that may be secrets: recipe.yaml alone holds them, for its owner alone.

Files of jobs have none of them: the process that needs a value reads the recipe when it starts.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.errors import ClusterError, RecipeError

_PRIVATE_KEY_PATTERN = re.compile(r"(^|\.)(variables|workflow_kwargs)(\.|$)")
_PRIVATE_WORD_PATTERN = re.compile(r"(?<!\w)(variables|workflow_kwargs)(?!\w)")
_HIDDEN_VALUE_TEXT = "(in recipe.yaml)"


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

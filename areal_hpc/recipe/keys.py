"""Dotted keys of recipes, and hiding of values that may be secrets.

Only recipe.yaml, readable by its owner alone, holds such values. Files of jobs have none of them:
a process that needs a value reads the recipe when it starts. Commands that view runs import this.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.errors import ClusterError, RecipeError

USUAL_SECTIONS = ("trainer", "rollout", "inference")
"""Sections searched first for a key that was written without its section."""


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested mapping by dotted keys; lists have `sources.0.weight`."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if (section := _get_section(value)) is not None:
            leaves |= flatten_keys(section, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _get_section(value: Any) -> Mapping[Any, Any] | None:
    """Return a mapping as it is, and a list of mappings by its positions; None for others."""
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return {str(position): item for position, item in enumerate(value)}
    return value if isinstance(value, Mapping) else None


def flatten_keys_hiding_private_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values by dotted keys, with possible secrets hidden."""
    return flatten_keys(hide_private_values_equal_in(recipe, recipe))


def rank_section(dotted_key: str) -> tuple[int, int]:
    """Compute a key's sort order: `USUAL_SECTIONS` first, then by depth."""
    section = dotted_key.partition(".")[0]
    position = USUAL_SECTIONS.index(section) if section in USUAL_SECTIONS else len(USUAL_SECTIONS)
    return position, dotted_key.count(".")


_PRIVATE_KEY_PATTERN = re.compile(r"(^|\.)(variables|workflow_kwargs)(\.|$)")
_PRIVATE_WORD_PATTERN = re.compile(r"(?<!\w)(variables|workflow_kwargs)(?!\w)")
_HIDDEN_VALUE_TEXT = "(in recipe.yaml)"


def read_role_variables(recipe: Path, role: str) -> dict[str, str]:
    """Read the environment variables that a run's recipe gives to a role's processes."""
    variables: dict[str, str] = _read_recipe(recipe)["cluster"][role].get("variables", {})
    return variables


def hide_private_values_equal_in(tree: Any, stored: Any, key: str = "") -> Any:
    """Replace the private values of a recipe that are equal in the stored one."""
    if (section := _get_section(tree)) is not None:
        stored_values = _get_section(stored) or {}
        shown = {
            name: hide_private_values_equal_in(value, stored_values.get(name), f"{key}.{name}")
            for name, value in section.items()
        }
        return shown if isinstance(tree, Mapping) else [*shown.values()]
    return _HIDDEN_VALUE_TEXT if tree == stored and _PRIVATE_KEY_PATTERN.search(key) else tree


def hide_private_arguments(arguments: list[str]) -> Iterator[str]:
    """Replace the private values in a command line's overrides.

    A key may be written as `cluster.agents[variables]`, or be part of a section's value:
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

"""Dotted keys of recipes, and values that may be secrets.

recipe.yaml alone holds such values, for its owner alone. Files of jobs have none of them: the
process that needs a value reads the recipe when it starts. Commands that look at runs import this.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.errors import ClusterError, RecipeError

USUAL_SECTIONS = ("trainer", "rollout", "inference")
"""Where a key is looked for first that was written without its section."""


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the leaves of a nested mapping."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flatten_keys(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def flatten_keys_hiding_private_values(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys of a recipe with their values; values that may be secrets are hidden."""
    return flatten_keys(hide_private_values_equal_in(recipe, recipe))


def rank_section(dotted_key: str) -> tuple[int, int]:
    """Order of a key: those of `USUAL_SECTIONS` come first, then the outermost."""
    section = dotted_key.partition(".")[0]
    usual = USUAL_SECTIONS.index(section) if section in USUAL_SECTIONS else len(USUAL_SECTIONS)
    return usual, dotted_key.count(".")


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

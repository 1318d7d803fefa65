"""Dotted keys of recipes. Light: commands that look at runs import it."""

from collections.abc import Mapping
from typing import Any

from areal_hpc.recipe.private_values import hide_private_values_equal_in

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

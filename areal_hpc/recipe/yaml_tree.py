"""YAML files and dotted overrides as nested mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_hpc.errors import Problem, RecipeError


def read_yaml_tree(path: Path) -> DictConfig:
    """The keys of a YAML file.

    Raises:
        RecipeError: It is not YAML, or holds no keys.
    """
    try:
        tree = OmegaConf.load(path)
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    except Exception as error:  # boundary: PyYAML's errors have no common public base
        raise RecipeError(f"{path} is not YAML: {error}", key=str(path)) from error
    if not OmegaConf.is_dict(tree):
        raise RecipeError(f"{path} holds a list, expected keys and values", key=str(path))
    return tree


def read_overrides(overrides: Sequence[str]) -> DictConfig:
    """The keys of `key.subkey=value` arguments.

    Raises:
        RecipeError: Some are not of that form; all of these at once. Or a value is not YAML.
    """
    try:
        return OmegaConf.from_dotlist(_checked(overrides))
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"the overrides cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"a value is not YAML: {error}") from error


def _checked(overrides: Sequence[str]) -> list[str]:
    wrong = [item for item in overrides if "=" not in item]
    if wrong:
        raise RecipeError.of(
            Problem(f"expected key=value, got {item!r}", hint="for example: trainer.total_steps=10")
            for item in wrong
        )
    return list(overrides)


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the leaves of a nested mapping."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flatten_keys(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found

"""Recipes from YAML files, site files and overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.base import explain_validation_error
from areal_hpc.recipe.cross_checks import find_conflicts
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import ClusterConfig


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), site: Path | None = None
) -> Recipe:
    """The recipe of a file: overrides win over it, and it wins over the keys of a site file.

    Raises:
        RecipeError: Every problem of the recipe at once: unknown keys with the nearest known
            one, wrong types with expected and got, values that do not fit together.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"there is no recipe at {path}", hint="ls recipes/")
    trees = [] if site is None else [OmegaConf.create({"cluster": read_site_file(site)})]
    trees += [_read_yaml(path), parse_overrides(overrides)]
    try:
        values = OmegaConf.to_container(OmegaConf.merge(*trees), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    return build_recipe(values)


def build_recipe(values: object) -> Recipe:
    """The recipe of a tree of keys; a RecipeError tells every problem at once."""
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        raise RecipeError.from_problems(
            explain_validation_error(item, Recipe) for item in error.errors()
        ) from None
    if problems := list(find_conflicts(recipe)):
        raise RecipeError.from_problems(problems)
    return recipe


def read_site_file(path: Path) -> DictConfig:
    """The keys of a site file, each checked, though it need not hold all that a cluster has.

    Raises:
        RecipeError: Every problem of the file at once.
    """
    if not path.is_file():
        raise RecipeError(f"there is no site file at {path}", hint="ls slurm/sites/")
    tree = _read_yaml(path)
    try:
        ClusterConfig.model_validate(OmegaConf.to_container(tree))
    except ValidationError as error:
        problems = [
            explain_validation_error(item, ClusterConfig, f"{path}: ")
            for item in error.errors()
            if item["type"] != "missing"
        ]
        if problems:
            raise RecipeError.from_problems(problems) from None
    return tree


def _read_yaml(path: Path) -> DictConfig:
    try:
        tree = OmegaConf.load(path)
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    except (yaml.YAMLError, OSError) as error:  # OSError: a number, or a text
        raise RecipeError(f"{path} is not YAML: {error}", key=str(path)) from error
    if not OmegaConf.is_dict(tree):
        raise RecipeError(f"{path} holds a list, expected keys and values", key=str(path))
    return tree


def parse_overrides(overrides: Sequence[str]) -> DictConfig:
    """The keys of `key.subkey=value` arguments.

    Raises:
        RecipeError: Some are not of that form; all of these at once. Or a value is not YAML.
    """
    if wrong := [item for item in overrides if "=" not in item]:
        hint = "for example: trainer.total_steps=10"
        raise RecipeError.from_problems(
            Problem(f"expected key=value, got {item!r}", hint=hint) for item in wrong
        )
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"the overrides cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"a value is not YAML: {error}") from error


def flatten_keys(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of the leaves of a nested mapping."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flatten_keys(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found

"""Recipes from YAML files, site files and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.base import explain_validation_error
from areal_hpc.recipe.cross_checks import CROSS_CHECKS
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import ClusterConfig
from areal_hpc.recipe.yaml_tree import read_overrides, read_yaml_tree


def load_recipe(
    path: Path | str, overrides: Sequence[str] = (), site: Path | None = None
) -> Recipe:
    """Read a recipe and apply `key.subkey=value` overrides.

    Args:
        path: The recipe.
        overrides: Win over the recipe.
        site: A file with keys of `cluster`, over which the recipe's own win.

    Raises:
        RecipeError: Every problem of the recipe at once: unknown keys with the nearest known
            one, wrong types with expected and got, values that do not fit together.
    """
    path = Path(path)
    if not path.is_file():
        raise RecipeError(f"there is no recipe at {path}", hint="ls recipes/")
    trees = [] if site is None else [OmegaConf.create({"cluster": read_site_file(site)})]
    trees += [read_yaml_tree(path), read_overrides(overrides)]
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
        raise RecipeError.of(
            explain_validation_error(item, Recipe) for item in error.errors()
        ) from None
    problems = [problem for check in CROSS_CHECKS for problem in check(recipe)]
    if problems:
        raise RecipeError.of(problems)
    return recipe


def read_site_file(path: Path) -> DictConfig:
    """The keys of a site file, each checked, though it need not hold all that a cluster has.

    Raises:
        RecipeError: Every problem of the file at once.
    """
    if not path.is_file():
        raise RecipeError(f"there is no site file at {path}", hint="ls slurm/sites/")
    tree = read_yaml_tree(path)
    try:
        ClusterConfig.model_validate(OmegaConf.to_container(tree))
    except ValidationError as error:
        problems = [
            explain_validation_error(item, ClusterConfig, f"{path}: ")
            for item in error.errors()
            if item["type"] != "missing"
        ]
        if problems:
            raise RecipeError.of(problems) from None
    return tree

"""Files of recipes: where they are, what YAML they hold, and which others they extend."""

import difflib
import os
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.shipped import (
    find_shipped_recipe,
    is_recipe_name,
    list_shipped_recipes,
    suggest_recipe_name,
)

EXTENDS_KEY = "extends"
"""At the top of a recipe's file: the recipe over which its keys are merged."""


def find_recipe_file(path: Path) -> Path:
    """The file of a recipe; a shipped one may be given by its name."""
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, expected a recipe", hint=f"ls {path / '*.yaml'}")
    if shipped := list_shipped_recipes().get(str(path)):
        return shipped
    raise RecipeError(f"there is no recipe at {path}", hint=_suggest_recipe(path))


def list_recipe_files(path: Path) -> list[Path]:
    """A recipe's file and those that it extends, one after the other, itself first.

    Raises:
        RecipeError: One is missing or cannot be read, or one extends itself by way of others.
    """
    files = [path]
    while base := _read_extends(read_yaml(files[-1]), files[-1]):
        if any(base.samefile(one) for one in files):
            chain = " -> ".join(map(str, [*files, base]))
            raise RecipeError(
                f"a recipe extends itself: {chain}",
                key=f"{files[-1]}: {EXTENDS_KEY}",
                hint="leave `extends` out of the one that the others begin with",
            )
        files.append(base)
    return files


def _read_extends(tree: DictConfig, path: Path) -> Path | None:
    named = OmegaConf.to_container(tree).get(EXTENDS_KEY)
    if named is None:
        return None
    key = f"{path}: {EXTENDS_KEY}"
    if not isinstance(named, str):
        hint = "name one file or one shipped recipe, or leave it out"
        raise RecipeError(f"expected a path or a name, got {named!r}", key=key, hint=hint)
    if is_recipe_name(named):
        return find_shipped_recipe(named, key)
    base = Path(os.path.normpath(path.parent / named))
    if not base.is_file():
        raise RecipeError(
            f"there is no recipe at {base}", key=key, hint=_suggest_recipe(base, path)
        )
    return base


def _suggest_recipe(path: Path, extending: Path | None = None) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    names = [one.name for one in sorted(folder.glob("*.yaml")) if one != extending]
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f"did you mean {folder / near[0]}?"
    if is_recipe_name(str(path)):
        return suggest_recipe_name(str(path))
    return f"ls {folder / '*.yaml'}"


def read_yaml(path: Path) -> DictConfig:
    """The keys and values of a YAML file; a RecipeError says why it has none."""
    try:
        tree = OmegaConf.load(path)
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    except PermissionError as error:
        hint = "ask its owner for a copy without secrets, or run this as its owner"
        raise RecipeError(f"{path} may not be read", key=str(path), hint=hint) from error
    except (yaml.YAMLError, OSError) as error:  # OSError: a number, or a text
        hint = "mend the line that is named"
        raise RecipeError(f"{path} is not YAML: {error}", key=str(path), hint=hint) from error
    if not OmegaConf.is_dict(tree):
        raise RecipeError(f"{path} holds a list, expected keys and values", key=str(path))
    return tree

"""Files of recipes: the user's, shipped ones, and those that they extend.

A header is the comment at the top of a shipped recipe. Its first line is the recipe's purpose. Then

    # hardware        2 CPU cores, 6 GB
    # wall time       4 min
    # expected        held-out reward from 0.45 to 0.80
    # verified        2026-11-21

and, for each variant, the overrides that make it:

    # variant tools   trial_name=tools rollout.workflow=package.module.ToolAgent
"""

import difflib
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from areal_hpc.checkout import get_shipped_dir
from areal_hpc.errors import RecipeError

EXTENDS_KEY = "extends"
"""Key of the recipe over which a file's keys are merged."""


def find_recipe_file(path: Path) -> Path:
    """Find the file of a recipe, given by its path or by the name of a shipped recipe."""
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError(f"{path} is a folder, expected a recipe", hint=f"ls {path / '*.yaml'}")
    if shipped := list_shipped_recipes().get(str(path)):
        return shipped
    raise RecipeError(f"there is no recipe at {path}", hint=_suggest_recipe(path))


def list_recipe_files(path: Path) -> list[Path]:
    """List a recipe's file and those that it extends in turn, the recipe's first.

    Raises:
        RecipeError: A file is missing or cannot be read, or extends itself through others.
    """
    files = [path]
    while base := _read_extends(read_yaml(files[-1]), files[-1]):
        if any(base.samefile(file) for file in files):
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
    names = [file.name for file in sorted(folder.glob("*.yaml")) if file != extending]
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f"did you mean {folder / near[0]}?"
    if is_recipe_name(str(path)):
        return suggest_recipe_name(str(path))
    return f"ls {folder / '*.yaml'}"


def read_yaml(path: Path) -> DictConfig:
    """Read the keys and values of a YAML file, or raise RecipeError."""
    try:
        tree = OmegaConf.load(path)
    except (OmegaConfBaseException, ValueError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", key=str(path)) from error
    except PermissionError as error:
        hint = "ask its owner for a copy without secrets, or run this as its owner"
        raise RecipeError(f"{path} may not be read", key=str(path), hint=hint) from error
    except (yaml.YAMLError, OSError) as error:  # OSError: the file is a number or a text
        hint = "correct the named line"
        raise RecipeError(f"{path} is not YAML: {error}", key=str(path), hint=hint) from error
    if not OmegaConf.is_dict(tree):
        raise RecipeError(f"{path} holds a list, expected keys and values", key=str(path))
    return tree


HEADER_FIELDS = ("hardware", "wall time", "expected", "verified")
"""Fields in the header of every shipped recipe, in this order."""
RECIPE_SUFFIXES = (".yaml", ".yml")
_FIELD_PATTERN = re.compile(rf"# ({'|'.join(HEADER_FIELDS)}) {{2,}}(\S.*)")
_VARIANT_PATTERN = re.compile(r"# variant (\S+) +(\S.*)")


@dataclass(frozen=True, slots=True)
class RecipeHeader:
    """Contents of the comment at the top of a recipe."""

    purpose: str
    hardware: str
    wall_time: str
    expected: str
    verified: str
    overrides_by_variant: Mapping[str, tuple[str, ...]]


def list_shipped_recipes() -> dict[str, Path]:
    """List the shipped recipes' files by name: quick starts, then by hardware, then variants."""
    root = get_shipped_dir() / "recipes"
    paths = {
        path.relative_to(root).as_posix().removesuffix(".yaml"): path
        for path in root.rglob("*.yaml")
    }
    return {name: paths[name] for name in sorted(paths, key=_compute_sort_key)}


def _compute_sort_key(name: str) -> tuple[bool, bool, list[tuple[int, str]]]:
    parts = re.findall(r"(\d+)|(\D+)", name)
    numbers = [(int(digits or 0), text) for digits, text in parts]
    return "/" in name, not name.startswith("quickstart"), numbers


def is_recipe_name(text: str) -> bool:
    """Return whether a text has the form of a shipped recipe's name, not of a path."""
    return (
        not text.endswith(RECIPE_SUFFIXES)
        and re.fullmatch(r"(variants/)?[\w.-]+", text) is not None
    )


def find_shipped_recipe(name: str, key: str = "") -> Path:
    """Return the file of a shipped recipe.

    Raises:
        RecipeError: No shipped recipe has this name; the error names `key`.
    """
    known = list_shipped_recipes()
    if name not in known:
        raise RecipeError(
            f"there is no shipped recipe {name!r}", key=key, hint=suggest_recipe_name(name)
        )
    return known[name]


def suggest_recipe_name(name: str) -> str:
    """Suggest a name in place of one that no shipped recipe has."""
    near = difflib.get_close_matches(name, list_shipped_recipes(), n=1)
    return f"did you mean {near[0]}?" if near else "areal-hpc recipes lists those that are shipped"


def parse_header(text: str) -> RecipeHeader:
    """Parse the header of a recipe's text; missing fields are empty."""
    lines = text.splitlines()
    purpose = lines[0].removeprefix("# ") if lines and lines[0].startswith("# ") else ""
    fields = {}
    variants = {}
    for line in lines:
        if not line.startswith("#"):
            break
        if field := _FIELD_PATTERN.fullmatch(line):
            fields[field[1]] = field[2]
        elif variant := _VARIANT_PATTERN.fullmatch(line):
            variants[variant[1]] = tuple(shlex.split(variant[2]))
    hardware, wall_time, expected, verified = (fields.get(name, "") for name in HEADER_FIELDS)
    return RecipeHeader(purpose, hardware, wall_time, expected, verified, variants)

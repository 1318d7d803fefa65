"""Recipes that ship with the package: their names, and what their headers say.

A header is the comment at the top of a recipe. Its first line says what the recipe is for. Then

    # hardware        2 CPU cores, 6 GB
    # wall time       4 min
    # expected        held-out reward from 0.45 to 0.80
    # verified        2026-11-21

and, for each variant, the overrides that make it:

    # variant tools   trial_name=tools rollout.workflow=package.module.ToolAgent
"""

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from areal_hpc.checkout import get_shipped_dir
from areal_hpc.errors import RecipeError

HEADER_FIELDS = ("hardware", "wall time", "expected", "verified")
"""Of every shipped recipe, in this order."""
RECIPE_SUFFIXES = (".yaml", ".yml")
_FIELD_PATTERN = re.compile(rf"# ({'|'.join(HEADER_FIELDS)}) {{2,}}(\S.*)")
_VARIANT_PATTERN = re.compile(r"# variant (\S+) +(\S.*)")


@dataclass(frozen=True, slots=True)
class RecipeHeader:
    """What the comment at the top of a recipe says."""

    purpose: str
    hardware: str
    wall_time: str
    expected: str
    verified: str
    overrides_by_variant: Mapping[str, tuple[str, ...]]


def list_shipped_recipes() -> dict[str, Path]:
    """Files of the shipped recipes by name: quick starts, then by hardware, then variants."""
    root = get_shipped_dir() / "recipes"
    paths = {
        path.relative_to(root).as_posix().removesuffix(".yaml"): path
        for path in root.rglob("*.yaml")
    }
    return {name: paths[name] for name in sorted(paths, key=_compute_place)}


def _compute_place(name: str) -> tuple[bool, bool, list[tuple[int, str]]]:
    parts = re.findall(r"(\d+)|(\D+)", name)
    numbers = [(int(digits or 0), text) for digits, text in parts]
    return "/" in name, not name.startswith("quickstart"), numbers


def is_recipe_name(text: str) -> bool:
    """True for the name of a shipped recipe, as against the path of a file."""
    return (
        not text.endswith(RECIPE_SUFFIXES)
        and re.fullmatch(r"(variants/)?[\w.-]+", text) is not None
    )


def find_shipped_recipe(name: str, key: str = "") -> Path:
    """The file of a shipped recipe.

    Raises:
        RecipeError: There is none of that name; names `key`.
    """
    known = list_shipped_recipes()
    if name not in known:
        raise RecipeError(
            f"there is no shipped recipe {name!r}", key=key, hint=suggest_recipe_name(name)
        )
    return known[name]


def suggest_recipe_name(name: str) -> str:
    """What to try instead of a name that no shipped recipe has."""
    near = difflib.get_close_matches(name, list_shipped_recipes(), n=1)
    return f"did you mean {near[0]}?" if near else "areal-hpc recipes lists those that are shipped"


def parse_header(text: str) -> RecipeHeader:
    """The header of a recipe's text; what it does not say is empty."""
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

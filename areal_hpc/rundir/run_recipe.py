"""Recipe of a run as its directory keeps it: resolved, read as plain YAML.

Looking at a run needs no more, and so runs of older and newer versions can be looked at, too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from areal_hpc.errors import RecipeError

PRIVATE_RECIPE_PLACEHOLDER: dict[str, Any] = {"trainer": {}}
"""What others see of a recipe: it may hold keys of other services, and its owner alone reads it."""


def read_run_recipe(path: Path) -> dict[str, Any]:
    """The values of a resolved recipe by section; `PRIVATE_RECIPE_PLACEHOLDER` for another user's.

    Raises:
        RecipeError: There is none, or it is damaged.
    """
    try:
        found = yaml.safe_load(path.read_text())
        if not isinstance(found, dict):
            raise ValueError(f"expected sections, got {type(found).__name__}")
        if not isinstance(found.get("trainer"), dict):
            raise ValueError("it has no section `trainer`")
    except PermissionError:
        return PRIVATE_RECIPE_PLACEHOLDER
    except (OSError, ValueError, yaml.YAMLError) as error:
        hint = "restore the file from a backup, or from an earlier launch among jobs/"
        message = f"the run's recipe cannot be read: {' '.join(str(error).split())}"
        raise RecipeError(message, key=str(path), hint=hint) from error
    return found


def get_recipe_value(recipe: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key of a recipe as a run keeps it; None if it is not there.

    What stands above it may be damaged, or of another version.
    """
    value: Any = recipe
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value

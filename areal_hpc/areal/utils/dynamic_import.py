"""AReaL's `areal.utils.dynamic_import` (a wrapper of `import_by_path`)."""

from typing import Any

from areal_hpc.areal.config.conversions import map_areal_module
from areal_hpc.recipe.user_functions import import_by_path


def import_from_string(dotted_path: str) -> Any:
    """The object that `package.module.name` names; `areal.` stands for `areal_hpc.areal.`.

    Raises:
        ImportError: There is no such module, or it has no such name.
        ValueError: The path has no dot.
    """
    return import_by_path(map_areal_module(dotted_path))

"""Import of user functions that a recipe names (`package.module:function`)."""

import importlib
from collections.abc import Callable
from typing import Any

from areal_hpc.errors import RecipeError


def import_by_path(dotted_path: str) -> Any:
    """The object that `package.module.name` names.

    Raises:
        ImportError: There is no such module, or it has no such name.
        ValueError: The path has no dot.
    """
    module, dot, name = dotted_path.rpartition(".")
    if not dot:
        raise ValueError(f"expected package.module.name, got {dotted_path!r}")
    found = importlib.import_module(module)
    if not hasattr(found, name):
        raise ImportError(f"the module {module!r} has no {name!r}", name=module)
    return getattr(found, name)


def load_user_function(dotted: str, key: str) -> Callable[..., Any]:
    """The user's function that a recipe's `key` names.

    Raises:
        RecipeError: There is no such function, or importing its module fails; names `key`.
    """
    module, colon, name = dotted.partition(":")
    if not colon:
        raise RecipeError(f"expected `package.module:function`, got {dotted!r}", key=key)
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # boundary: importing runs the user's code
        raise RecipeError(
            f"{dotted!r} cannot be imported ({type(error).__name__}: {error})",
            key=key,
            hint="start the run from the directory that contains the package",
        ) from error
    if not callable(function):
        raise RecipeError(f"{dotted!r} is a {type(function).__name__}, not a function", key=key)
    return function

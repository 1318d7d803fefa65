"""Import of user functions that a recipe names (`package.module:function`)."""

import difflib
import importlib
import pkgutil
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_hpc.checkout import format_missing_module_hint
from areal_hpc.errors import RecipeError, describe_exception

MAX_SHOWN_FRAMES = 5
"""Number of innermost frames of a traceback that an error shows."""
_PACKAGE_DIR = Path(__file__).resolve().parents[1]


def import_by_path(dotted_path: str) -> Any:
    """Import the object `package.module.name`.

    Raises:
        ImportError: There is no such module, or it has no such name.
        ValueError: The path has no dot.
    """
    module, dot, name = dotted_path.rpartition(".")
    if not dot:
        raise ValueError(f"expected package.module.name, got {dotted_path!r}")
    imported = importlib.import_module(module)
    if not hasattr(imported, name):
        raise ImportError(f"the module {module!r} has no {name!r}", name=module)
    return getattr(imported, name)


def load_user_function(dotted_path: str, key: str) -> Callable[..., Any]:
    """Load the user's function that a recipe's `key` names.

    Raises:
        RecipeError: There is no such function, or its import fails; the error names `key`.
    """
    module, colon, name = dotted_path.partition(":")
    if not colon:
        raise RecipeError(f"expected `package.module:function`, got {dotted_path!r}", key=key)
    imported = import_user_module(module, dotted_path, key)
    function: Callable[..., Any] | None = getattr(imported, name, None)
    if function is None:
        known = [other for other, value in vars(imported).items() if callable(value)]
        raise RecipeError(
            f"{dotted_path!r}: the module {module!r} has no {name!r}"
            f"{format_name_suggestion(name, known)}",
            key=key,
            hint=f"name a function of {getattr(imported, '__file__', None) or module}",
        )
    if not callable(function):
        raise RecipeError(
            f"{dotted_path!r} is a {type(function).__name__}, not a function", key=key
        )
    return function


def import_user_module(
    module: str, dotted_path: str, key: str, where: str = "in its environment"
) -> ModuleType:
    """Import a module part by part, so that the error can name the first one that fails.

    `where` names, in hints, the environment that needs a missing module.

    Raises:
        RecipeError: There is no such module, or its import fails; the error names `key`.
    """
    parts = module.split(".")
    imported: ModuleType | None = None
    for end in range(1, len(parts) + 1):
        prefix = ".".join(parts[:end])
        try:
            imported = importlib.import_module(prefix)
        except ModuleNotFoundError as error:
            if error.name != prefix:
                raise _build_import_error(prefix, dotted_path, key, where, error) from error
            path = None if imported is None else getattr(imported, "__path__", [])
            known = [module_info.name for module_info in pkgutil.iter_modules(path)]
            raise RecipeError(
                f"{dotted_path!r}: there is no module {prefix!r}"
                f"{format_name_suggestion(parts[end - 1], known)}",
                key=key,
                hint=format_missing_module_hint(prefix, where),
            ) from error
        except (Exception, SystemExit) as error:  # boundary: importing runs the user's code
            raise _build_import_error(prefix, dotted_path, key, where, error) from error
    assert imported is not None  # `split` returns at least one part
    return imported


def _build_import_error(
    module: str, dotted_path: str, key: str, environment_text: str, error: BaseException
) -> RecipeError:
    return RecipeError(
        f"{dotted_path!r}: importing {module!r} raised {describe_user_error(error)}",
        key=key,
        hint=f"fix that module, or install what it needs {environment_text}",
    )


def describe_user_error(error: BaseException) -> str:
    """Describe an error as `ValueError: reason`, and list the traceback's frames in user code."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if _PACKAGE_DIR not in Path(frame.filename).parents and "importlib" not in frame.filename
    ]
    lines = [
        f"  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
        for frame in frames[-MAX_SHOWN_FRAMES:]
    ]
    if isinstance(error, SyntaxError):
        lines.append(f"  {error.filename}:{error.lineno}: {(error.text or '').strip()}")
    return "\n".join([describe_exception(error), *lines])


def format_name_suggestion(name: str, known_names: Iterable[str]) -> str:
    """Suggest the most similar known name as `; did you mean 'this'?`; else empty."""
    near = difflib.get_close_matches(name, list(known_names), n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""

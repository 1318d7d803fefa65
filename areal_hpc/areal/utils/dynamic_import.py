"""Names in configurations, made into what they name."""

from __future__ import annotations

import importlib
from typing import Any

from areal_hpc.areal_config.run_rules import as_here


def import_from_string(dotted_path: str) -> Any:
    """What `package.module.name` names; `areal.` is this package's root.

    Raises:
        ImportError: There is no such module, or nothing of that name in it.
        ValueError: The path has no dot.
    """
    module, dot, name = dotted_path.rpartition(".")
    if not dot:
        raise ValueError(f"expected package.module.name, got {dotted_path!r}")
    found = importlib.import_module(as_here(module))
    if not hasattr(found, name):
        raise ImportError(f"the module {module!r} has no {name!r}", name=module)
    return getattr(found, name)

"""Import hook that answers `import areal...` with `areal_hpc.areal...`.

For code whose imports cannot be edited, and always explicit: `python -m areal_hpc.areal script.py`
(or `-m module`) runs a script with it, `import areal_hpc.areal.import_hook` installs it for the
process.
"""

import difflib
import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

from areal_hpc.areal.reexports import MODULES
from areal_hpc.errors import RecipeError

AREAL_PACKAGE = "areal"
OLD_MODULE_BY_NEW = {
    "areal.infra": "areal.launcher",
    "areal.infra.launcher": "areal.launcher",
    "areal.infra.launcher.local": "areal.launcher.local",
}
"""Newer paths of AReaL's, and the older ones that are here."""


class ArealFinder(MetaPathFinder):
    """Finds AReaL's modules in `areal_hpc.areal`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != AREAL_PACKAGE:
            return None
        here = f"areal_hpc.{OLD_MODULE_BY_NEW.get(name, name)}"
        try:
            is_here = importlib.util.find_spec(here) is not None
        except ModuleNotFoundError:
            is_here = False
        if not is_here:
            raise ModuleNotFoundError(_describe_unknown_module(name), name=name)
        return ModuleSpec(name, _AliasLoader(here), is_package=True)


class _AliasLoader(Loader):
    def __init__(self, alias_module: str) -> None:
        self._here = alias_module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._here)
        self._own_spec = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


def install_import_hook() -> None:
    """Answer `import areal...` from now on; a second call changes nothing.

    Raises:
        RecipeError: A real AReaL is installed.
    """
    if any(isinstance(one, ArealFinder) for one in sys.meta_path):
        return
    if PathFinder.find_spec(AREAL_PACKAGE) is not None:
        raise RecipeError(
            "AReaL itself is installed in this environment, so the import hook for `areal` is "
            "not installed",
            hint="uninstall it, or change the import root to areal_hpc.areal",
        )
    # First: Python's own finder would load a second copy of each module from the package's folder.
    sys.meta_path.insert(0, ArealFinder())


def _describe_unknown_module(module_name: str) -> str:
    package = Path(__file__).parent
    files = (path.relative_to(package).with_suffix("") for path in package.rglob("*.py"))
    known = [".".join(file.parts).removesuffix(".__init__") for file in files]
    known = [f"{AREAL_PACKAGE}.{name}" for name in (*known, *MODULES)]
    near = difflib.get_close_matches(module_name, [*known, *OLD_MODULE_BY_NEW], n=1)
    return f"areal_hpc does not provide {module_name!r}" + (
        f"; did you mean {near[0]}?" if near else ""
    )


install_import_hook()

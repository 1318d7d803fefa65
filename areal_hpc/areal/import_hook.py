"""`import areal...` answered by this package, for code whose imports cannot be edited.

Explicit, always: `python -m areal_hpc.compat script.py ...` (or `-m module`) runs a script with it,
`import areal_hpc.compat` switches it on for the process. Nothing else does.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from areal_hpc.errors import RecipeError
from areal_hpc.launcher.local import run_script

ROOT = "areal"
MODULES = {
    f"{ROOT}.{name}": f"areal_hpc.{target or name}"
    for name, target in {
        "api.workflow_api": "",
        "api.reward_api": "",
        "api.cli_args": "",
        "experimental": "",
        "experimental.openai": "",
        "experimental.openai.client": "experimental.openai",
        "experimental.camel": "",
        "experimental.camel.openai_model": "",
        "experimental.trainer": "",
        "utils": "",
        "utils.dynamic_import": "",
        "utils.hf_utils": "",
        "utils.stats_logger": "",
        "launcher": "",
        "launcher.local": "",
        "infra": "launcher",
        "infra.launcher": "launcher",
        "infra.launcher.local": "launcher.local",
        "workflow": "",
        "reward": "",
    }.items()
}
"""AReaL's modules of both generations, and ours."""
OPEN = (f"{ROOT}.workflow", f"{ROOT}.reward")
"""Packages whose modules all have the same names here."""
NAMES = {
    ROOT: {"PPOTrainer": "areal_hpc.ppo_trainer"},
    f"{ROOT}.api": {
        "AgentWorkflow": "areal_hpc.api.workflow_api",
        "RolloutWorkflow": "areal_hpc.api.workflow_api",
        "AsyncRewardWrapper": "areal_hpc.api.reward_api",
    },
    f"{ROOT}.dataset": {"get_custom_dataset": "areal_hpc.dataset.custom"},
}
"""Packages that hold names beside modules: name -> where it lives here."""


class ArealFinder(MetaPathFinder):
    """Finds AReaL's modules here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """The specification of one of AReaL's modules; None for any other.

        Raises:
            ModuleNotFoundError: It would be one of AReaL's, and there is none of that name here.
        """
        if name.partition(".")[0] != ROOT:
            return None
        if name in NAMES:
            return ModuleSpec(name, _Named(NAMES[name]), is_package=True)
        here = MODULES.get(name)
        if here is None and name.startswith(tuple(f"{one}." for one in OPEN)):
            here = f"areal_hpc{name.removeprefix(ROOT)}"
        if here is None or not _exists(here):
            raise ModuleNotFoundError(_unknown(name), name=name)
        return ModuleSpec(name, _Alias(here), is_package=True)


class _Alias(Loader):
    """The very module of ours, under AReaL's name: its classes are the same objects."""

    def __init__(self, here: str) -> None:
        self._here = here

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._here)
        self._own_spec = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec


class _Named(Loader):
    """A package whose names are looked up when they are asked for."""

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__getattr__"] = self._reader(module.__name__)

    def _reader(self, package: str) -> Callable[[str], Any]:
        def read(name: str) -> Any:
            if name in self._names:
                return getattr(importlib.import_module(self._names[name]), name)
            if name.startswith("__") or f"{package}.{name}" in (*MODULES, *NAMES):
                raise AttributeError(name)  # the import system then looks for a module
            known = [*self._names, *(one.rpartition(".")[2] for one in MODULES)]
            near = difflib.get_close_matches(name, known, n=1)
            # `from areal import name` would replace the message of an AttributeError.
            raise ImportError(
                f"areal_hpc has nothing for {package}.{name}"
                + (f"; did you mean {near[0]}?" if near else "")
            )

        return read


def install() -> None:
    """Answer `import areal...` from now on; a second time changes nothing.

    Raises:
        RecipeError: A real AReaL is installed.
    """
    if is_installed():
        return
    if PathFinder.find_spec(ROOT) is not None:
        raise RecipeError(
            "AReaL itself is installed here, so `import areal` is not ours to answer",
            hint="uninstall it, or change the import root to areal_hpc",
        )
    sys.meta_path.append(ArealFinder())


def is_installed() -> bool:
    """Whether this process answers `import areal...` so."""
    return any(type(one).__name__ == ArealFinder.__name__ for one in sys.meta_path)


def main(argv: Sequence[str]) -> int:
    """Run a script with the alias in place; its exit code."""
    return run_script(argv)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, [*MODULES, *NAMES], n=1)
    return f"areal_hpc has nothing for {name!r}" + (f"; did you mean {near[0]}?" if near else "")


if __name__ == "__main__":
    try:
        from areal_hpc import compat  # its own module, which scripts may import too
    except RecipeError as error:
        sys.exit(f"error: {error}")
    sys.exit(compat.main(sys.argv[1:]))
else:
    install()

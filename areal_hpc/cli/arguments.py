"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, TypeAlias

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RECIPE, RunPaths

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` returns. argparse has no public name for it."""


class CommandGroup:
    """Group of commands that `areal-hpc --help` lists together.

    Args:
        subparsers: Where the parsers of all commands are.
    """

    def __init__(self, subparsers: Subparsers) -> None:
        self._subparsers = subparsers
        self.help_by_command: dict[str, str] = {}
        """In the order in which they were added."""

    def add_parser(self, name: str, *, help: str, **options: Any) -> argparse.ArgumentParser:  # noqa: A002
        """The parser of a new command; see `argparse.ArgumentParser` for its options."""
        self.help_by_command[name] = help
        return self._subparsers.add_parser(name, **options)


def parse_run_dir(path: Path) -> RunPaths:
    """The run at `path`.

    Raises:
        RecipeError: There is none.
    """
    layout = RunPaths(path.resolve())
    if not layout.recipe.exists():
        raise RecipeError(
            f"there is no run at {path}", hint=f"pass a directory that contains {RECIPE}"
        )
    return layout

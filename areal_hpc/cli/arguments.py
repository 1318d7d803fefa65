"""What several commands make of their arguments."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeAlias

from areal_hpc.errors import RecipeError
from areal_hpc.layout import RunLayout

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a family adds its commands. argparse has no public name for it."""


def existing_run(path: Path) -> RunLayout:
    """The run at `path`.

    Raises:
        RecipeError: There is none.
    """
    layout = RunLayout(path.resolve())
    if not layout.recipe.exists():
        raise RecipeError(
            f"there is no run at {path}", hint="give a directory that holds a recipe.yaml"
        )
    return layout


def program() -> str:
    """How the user called this command line."""
    path = Path(sys.argv[0])
    return "python -m areal_hpc" if path.name == "__main__.py" else str(path)

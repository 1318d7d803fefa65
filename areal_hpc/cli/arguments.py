"""What several commands make of their arguments."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RECIPE, RunPaths

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a family adds its commands. argparse has no public name for it."""


def existing_run(path: Path) -> RunPaths:
    """The run at `path`.

    Raises:
        RecipeError: There is none.
    """
    layout = RunPaths(path.resolve())
    if not layout.recipe.exists():
        raise RecipeError(
            f"there is no run at {path}", hint=f"give a directory that holds a {RECIPE}"
        )
    return layout


def stop_on_signals(stop: threading.Event) -> None:
    """Let Ctrl-C and SIGTERM set `stop`, which jobs are given a moment to heed."""

    def ask(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():
            print("\nstopping: jobs get a moment to commit", file=sys.stderr)
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def program() -> str:
    """How the user calls this command line; from a script of theirs it is not known."""
    path = Path(sys.argv[0])
    return str(path) if path.name == "areal-hpc" else "python -m areal_hpc"

"""Commands, and the arguments that several of them share."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RECIPE_FILE, RunPaths

HELP_WIDTH = 78
"""Of descriptions, which argparse leaves as they are together with the examples."""
UNHEALTHY_EXIT_CODE = 1
"""What was looked at is not well, and somebody has to act."""
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` returns. argparse has no public name for it."""
Command: TypeAlias = Callable[[argparse.Namespace], int]

SHARED_ARGUMENTS: dict[str, dict[str, Any]] = {
    "run": {"type": Path, "help": "a run directory"},
    "recipe": {"type": Path, "help": "a recipe: a YAML file, or the name of a shipped one"},
    "overrides": {
        "nargs": "*",
        "default": [],  # else argparse calls it required
        "metavar": "key=value",
        "help": "such as trainer.total_steps=10",
    },
    "--site": {
        "type": Path,
        "metavar": "FILE",
        "help": "site file: defaults for `cluster.*`; the recipe takes precedence",
    },
    "--fresh": {
        "action": "store_true",
        "help": "move an existing run directory away and start over",
    },
}


class CommandGroup:
    """Group of commands that help lists together.

    `tells_help` leaves the list to argparse, which knows no groups.
    """

    def __init__(self, subparsers: Subparsers, *, tells_help: bool = False) -> None:
        self._subparsers = subparsers
        self._tells_help = tells_help
        self.help_by_command: dict[str, str] = {}

    def add_command(
        self,
        command_name: str,
        command: Command,
        shared_arguments: Sequence[str] = (),
        *,
        example: str = "",
        **options: Any,
    ) -> argparse.ArgumentParser:
        """The parser of a new command; options are argparse's, with `help`.

        `shared_arguments` names those of `SHARED_ARGUMENTS` that it takes, in their order;
        `example` has command lines that its help shows.
        """
        lines = example.splitlines()
        if lines:
            head = "examples" if len(lines) > 1 else "example"
            options["epilog"] = "\n  ".join([f"{head}:", *lines])
        # It keeps the lines of the examples.
        options["formatter_class"] = argparse.RawDescriptionHelpFormatter
        parser = self._add_parser(command_name, options)
        for argument in shared_arguments:
            parser.add_argument(argument, **SHARED_ARGUMENTS[argument])
        parser.set_defaults(command=command, parser=parser)
        return parser

    def add_subcommand_group(self, command_name: str, **options: Any) -> CommandGroup:
        """The commands of `areal-hpc NAME ACTION`; options as for `add_command`."""
        actions = self._add_parser(command_name, options).add_subparsers(required=True)
        return CommandGroup(actions, tells_help=True)

    def _add_parser(self, command_name: str, options: dict[str, Any]) -> argparse.ArgumentParser:
        help_: str = options["help"]
        self.help_by_command[command_name] = help_
        description = options.get("description") or f"{help_[0].upper()}{help_[1:]}."
        options["description"] = textwrap.fill(description, HELP_WIDTH)
        if not self._tells_help:
            del options["help"]
        return self._subparsers.add_parser(command_name, **options)


def find_subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Parsers of the commands below one, by name; empty if it has none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def parse_run_dir(path: Path) -> RunPaths:
    paths = RunPaths(path.resolve())
    if not paths.recipe.exists():
        raise RecipeError(
            f"there is no run at {path}", hint=f"pass a directory that contains {RECIPE_FILE}"
        )
    return paths


def parse_positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def parse_step_range(text: str) -> tuple[int, int]:
    """First and last of `10..20`, or of `10` alone."""
    found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise argparse.ArgumentTypeError(f"expected steps such as 10..12, got {text!r}")
    return first, last


def parse_slurm_job_id(text: str) -> str:
    """A job's number, or that of an array's task (`17_3`)."""
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"expected the number of a Slurm job, got {text!r}")
    return text

"""Commands, the arguments that several of them share, and errors of usage."""

from __future__ import annotations

import argparse
import difflib
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


COMMAND_BY_MISTAKEN_NAME = {
    "train": "run",
    "start": "run",
    "launch": "run",
    "sbatch": "submit",
    "stop": "cancel",
    "kill": "cancel",
    "continue": "resume",
    "restart": "resume",
    "ps": "list",
    "ls": "list",
    "show": "status",
    "log": "logs",
    "tail": "logs",
    "explain": "why",
    "check": "doctor",
    "download": "prefetch",
    "convert": "migrate",
    "keys": "recipe-keys",
}
MAX_SUGGESTED_KEYS = 3


def exit_on_unknown_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    known = find_subparsers(parser)
    if not argv:
        parser.error(f"expected a command (`{parser.prog} --help` lists all)")
    name = argv[0]
    if not name or name.startswith("-") or name in known:
        return
    near = [COMMAND_BY_MISTAKEN_NAME[name]] if name in COMMAND_BY_MISTAKEN_NAME else []
    near = near or difflib.get_close_matches(name, known, n=1)
    meant = f"; did you mean `{parser.prog} {near[0]}`?" if near else ""
    parser.error(f"there is no command {name!r}{meant} (`{parser.prog} --help` lists all)")


def describe_unknown_arguments(
    unknown_arguments: Sequence[str], argv: Sequence[str], *, takes_keys: bool
) -> str:
    option = next((item for item in unknown_arguments if item.startswith("-")), "")
    message = f"unrecognized arguments: {' '.join(unknown_arguments)}"
    if not (takes_keys and option):
        return message
    name, equals, value = option.lstrip("-").partition("=")
    if not equals:
        after = [*argv][[*argv].index(option) + 1 :] if option in argv else []
        value = after[0] if after and not after[0].startswith("-") else "..."
    keys = suggest_recipe_keys(name)
    if keys:
        written = " or ".join(f"{key}={value}" for key in keys)
        return f"{message}; keys of a recipe are written without dashes: write {written}"
    return f"{message}; keys of a recipe are written as key=value, without dashes"


def suggest_recipe_keys(key_name: str) -> list[str]:
    """Keys of a recipe that an option may have meant: of that name, else of a similar one."""
    from areal_hpc.recipe.reference import list_keys

    wanted = key_name.replace("-", "_")
    known = list_keys()
    exact = [key for key in known if key == wanted or key.endswith(f".{wanted}")]
    if not exact:
        last_names = {key.rpartition(".")[2] for key in known}
        near = difflib.get_close_matches(wanted.rpartition(".")[2], last_names, n=1, cutoff=0.8)
        exact = [key for key in known if near and key.rpartition(".")[2] == near[0]]
    # Shorter ones are the more common: trainer.total_steps before sft.optimizer.warmup_steps.
    return sorted(exact, key=lambda key: (key.count("."), known.index(key)))[:MAX_SUGGESTED_KEYS]

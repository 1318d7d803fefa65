"""Registration of commands, arguments that several commands share, and errors of usage."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RECIPE_FILE, RunPaths

HELP_WIDTH = 78
"""Width of descriptions, which argparse does not wrap, as it must not wrap the examples."""
UNHEALTHY_EXIT_CODE = 1
"""Exit code of a command that found a problem on which the user has to act."""
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Type that `add_subparsers` returns; argparse has no public name for it."""
Command: TypeAlias = Callable[[argparse.Namespace], int]
Argument: TypeAlias = tuple[list[str], dict[str, Any]]
"""Names of an argument, and argparse's options."""


def parse_positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def parse_step_range(text: str) -> tuple[int, int]:
    """Return the first and last step of `10..20` or `10:20`, or of `10` alone."""
    match = re.fullmatch(r"(\d+)(?:(?:\.\.|:)(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise argparse.ArgumentTypeError(f"expected steps such as 10..12 or 10:12, got {text!r}")
    return first, last


METAVAR_BY_TYPE: dict[Any, str] = {
    int: "N", parse_positive_int: "N", parse_step_range: "FIRST..LAST", Path: "FILE"
}  # fmt: skip
"""Names of options' values in the help, unless an option says another."""


def argument(*names_and_help: str, **options: Any) -> Argument:
    """Describe an argument by its names and, last, its help; `options` are those of argparse."""
    *names, help_ = names_and_help
    if names[0].startswith("-") and (metavar := METAVAR_BY_TYPE.get(options.get("type"))):
        options = {"metavar": metavar, **options}
    return names, {**options, "help": help_}


def flag(*names_and_help: str) -> Argument:
    return argument(*names_and_help, action="store_true")


RUN = argument("run", "a run directory", type=Path)
RECIPE = argument("recipe", "a recipe: a YAML file, or the name of a shipped one", type=Path)
OVERRIDES = argument(
    "overrides",
    "such as trainer.total_steps=10",
    nargs="*",
    default=[],  # else argparse calls it required
    metavar="key=value",
)
PLACE = argument(
    "place",
    "a file root, an experiment's directory or a run's; default %(default)s",
    type=Path,
    nargs="?",
    default=Path("runs"),
)
SITE = argument(
    "--site",
    "site file: defaults for `cluster.*`; the recipe takes precedence",
    type=Path,
)
FRESH = flag("--fresh", "move an existing run directory away and start over")


class CommandTable:
    """Commands of a module, which the help lists in the order of definition."""

    def __init__(self) -> None:
        self._commands: list[tuple[str, Command, Sequence[Argument | list[Argument]]]] = []
        self._groups: dict[str, str] = {}

    def add(
        self, command_name: str, *arguments: Argument | list[Argument]
    ) -> Callable[[Command], Command]:
        """Make a function a command. Its docstring is the help: summary, description, `$ examples`.

        Arguments in a list exclude one another. A name of two words is a command of a group.
        """

        def register(command: Command) -> Command:
            self._commands.append((command_name, command, arguments))
            return command

        return register

    def add_group(self, group_name: str, help_line: str) -> None:
        self._groups[group_name] = help_line

    def build_parsers(self, subparsers: Subparsers) -> dict[str, str]:
        """Add the parsers; return the help line of each group and of each command in none."""
        lines: dict[str, str] = {}
        groups: dict[str, Subparsers] = {}
        for name, command, arguments in self._commands:
            summary, description, examples = _split_docstring(command)
            line = f"{summary[:1].lower()}{summary[1:]}".removesuffix(".")
            group, _, action = name.rpartition(" ")
            if group and group not in groups:
                lines[group] = self._groups[group]
                about = f"{lines[group][0].upper()}{lines[group][1:]}."
                group_parser = subparsers.add_parser(group, description=about)
                groups[group] = group_parser.add_subparsers(required=True)
            options: dict[str, Any] = {"help": line} if group else {}
            if not group:
                lines[name] = line
            if examples:
                is_single = sum(not example.startswith(" ") for example in examples) == 1
                head = "example" if is_single else "examples"
                options["epilog"] = "\n  ".join([f"{head}:", *examples])
            parser = groups.get(group, subparsers).add_parser(
                action,
                description=textwrap.fill(description, HELP_WIDTH),
                formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps lines of examples
                **options,
            )
            for item in arguments:
                parent = parser.add_mutually_exclusive_group() if isinstance(item, list) else parser
                for names, argument_options in item if isinstance(item, list) else [item]:
                    parent.add_argument(*names, **argument_options)
            parser.set_defaults(command=command, parser=parser)
        return lines


def _split_docstring(command: Command) -> tuple[str, str, list[str]]:
    summary, _, rest = inspect.cleandoc(command.__doc__ or "").partition("\n")
    examples = re.findall(r"^\$ (.*)", rest, re.MULTILINE)
    rest = re.sub(r"^\$ .*", "", rest, flags=re.MULTILINE)
    return summary, " ".join([summary, *rest.split()]), examples


def find_subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands by name; empty if it has none."""
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


def parse_slurm_job_id(text: str) -> str:
    """Return the number of a job or of an array's task (`17_3`)."""
    if not re.fullmatch(r"[0-9]+(_[0-9]+)?", text):
        raise argparse.ArgumentTypeError(f"expected the number of a Slurm job, got {text!r}")
    return text


COMMAND_BY_MISTAKEN_NAME = {
    "train": "run",
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
    """Return recipe keys that an option may mean: of that name, else of a similar one."""
    from areal_hpc.recipe.reference import list_keys

    wanted = key_name.replace("-", "_")
    known = list_keys()
    matches = [key for key in known if key == wanted or key.endswith(f".{wanted}")]
    if not matches:
        last_names = {key.rpartition(".")[2] for key in known}
        near = difflib.get_close_matches(wanted.rpartition(".")[2], last_names, n=1, cutoff=0.8)
        matches = [key for key in known if near and key.rpartition(".")[2] == near[0]]
    # Keys with fewer parts are more common: trainer.total_steps, not sft.optimizer.warmup_steps.
    return sorted(matches, key=lambda key: (key.count("."), known.index(key)))[:MAX_SUGGESTED_KEYS]

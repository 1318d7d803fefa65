"""Entry point of `areal-hpc`: it builds the parser, runs a command, and prints errors."""

import argparse
import errno
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from areal_hpc import __version__
from areal_hpc.cli import develop, evaluate, explain, inspect, operate, prepare, run
from areal_hpc.cli.arguments import (
    Command,
    describe_unknown_arguments,
    exit_on_unknown_command,
)
from areal_hpc.errors import (
    ArealError,
    ClusterError,
    Problem,
    RecipeError,
    escape_controls,
)

COMMAND_TABLES = {
    "run": (run.commands, evaluate.commands),
    "prepare": (prepare.commands,),
    "inspect": (inspect.commands, explain.commands),
    "operate": (operate.commands,),
    "develop": (develop.commands,),
}
HINT_BY_PATH_ERROR: dict[type[OSError], str] = {
    FileExistsError: "name another, or remove it",
    FileNotFoundError: "check how it is written, and make the directory that it is in",
    IsADirectoryError: "name a file",
    NotADirectoryError: "name a directory",
    PermissionError: "ask its owner, or name another",
}
UNWRITABLE_STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of storage that is full, over quota or read-only, which no argument has caused."""
VARIADIC_ARGUMENTS = ("overrides", "names", "words")


def main(argv: Sequence[str] | None = None) -> None:
    _escape_unencodable()
    arguments = _parse_arguments(sys.argv[1:] if argv is None else argv)
    command: Command = arguments.command
    try:
        sys.exit(command(arguments))
    except ArealError as error:
        count = len(error.problems)
        head = "error: " if count == 1 else f"{count} errors:\n"
        print(escape_controls(f"{head}{error}"), file=sys.stderr)
        sys.exit(getattr(error, "code", error.exit_code))
    except tuple(HINT_BY_PATH_ERROR) as error:
        if not _is_named_path(arguments, error.filename):
            raise  # not a path that the user named
        hint = next(text for kind, text in HINT_BY_PATH_ERROR.items() if isinstance(error, kind))
        problem = Problem(str(error.strerror), error.filename, hint)
        print(escape_controls(f"error: {problem}"), file=sys.stderr)
        sys.exit(RecipeError.exit_code)
    except BrokenPipeError:
        sys.exit(0)  # the reader (head, less) has closed the pipe
    except OSError as error:
        if error.errno not in UNWRITABLE_STORAGE_ERRNOS:
            raise
        hint = "make room there, or have it write to another place"
        problem = Problem(str(error.strerror), str(error.filename or ""), hint)
        print(escape_controls(f"error: {problem}"), file=sys.stderr)
        sys.exit(ClusterError.exit_code)


def _escape_unencodable() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _is_named_path(arguments: argparse.Namespace, filename: object) -> bool:
    if not isinstance(filename, str):
        return False
    path = Path(filename).resolve()
    lists = [value if isinstance(value, list) else [value] for value in vars(arguments).values()]
    named = [value.resolve() for values in lists for value in values if isinstance(value, Path)]
    return any(
        path.is_relative_to(other) or (path.parent == other.parent and other.name in path.name)
        for other in named
    )


def _parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = build_parser()
    exit_on_unknown_command(parser, argv)
    arguments, rest = parser.parse_known_args(argv)
    variadic = next((name for name in VARIADIC_ARGUMENTS if hasattr(arguments, name)), None)
    end = rest.index("--") if "--" in rest else len(rest)  # of what may be options
    if rest and (variadic is None or any(item.startswith("-") for item in rest[:end])):
        # The parser of the command, which prints the usage of the command.
        arguments.parser.error(
            describe_unknown_arguments(rest, argv, takes_keys=variadic == "overrides")
        )
    if variadic is not None:
        words = [*getattr(arguments, variadic), *rest[:end], *rest[end + 1 :]]
        setattr(arguments, variadic, words)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc",
        description="Reinforcement learning of LLM agents on Slurm clusters.",
        formatter_class=argparse.RawDescriptionHelpFormatter,  # keeps the lines of the epilog
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", help="see below")
    help_by_group = {
        title: {
            name: line for table in tables for name, line in table.build_parsers(subparsers).items()
        }
        for title, tables in COMMAND_TABLES.items()
    }
    width = max(len(name) for helps in help_by_group.values() for name in helps)
    lines = []
    for title, helps in help_by_group.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {line}" for name, line in helps.items())]
    parser.epilog = "\n".join(lines[1:])
    return parser

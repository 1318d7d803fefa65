"""Errors of usage, with what was probably meant."""

import argparse
import difflib
from collections.abc import Sequence

from areal_hpc.cli.arguments import find_subparsers

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

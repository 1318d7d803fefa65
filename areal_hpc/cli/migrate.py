"""`areal-hpc migrate`: translate an AReaL configuration into a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup


def add_commands(commands: CommandGroup) -> None:
    """Add these commands to the command line."""
    migrate = commands.add_parser(
        "migrate",
        help="translate an AReaL configuration into a recipe",
        description="Print the recipe for an AReaL configuration, every key without a "
        "counterpart and why, and what the recipe still needs.",
    )
    migrate.add_argument("config", type=Path, help="the file that AReaL's --config names")
    migrate.add_argument("overrides", nargs="*", metavar="key=value", help="as AReaL takes them")
    migrate.add_argument(
        "--rows", type=int, help="number of training rows, to convert epochs to steps"
    )
    migrate.add_argument("--out", type=Path, help="write the recipe there instead of printing it")
    migrate.set_defaults(command=_migrate)


def _migrate(arguments: argparse.Namespace) -> int:
    import yaml

    from areal_hpc.areal.config.loading import read_areal_tree
    from areal_hpc.areal.config.translation import translate_to_recipe
    from areal_hpc.errors import RecipeError
    from areal_hpc.recipe.loading import build_recipe

    translation = translate_to_recipe(
        read_areal_tree(arguments.config, arguments.overrides), arguments.rows
    )
    text = yaml.safe_dump(translation.recipe, sort_keys=False)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(f"# From {arguments.config}, by areal-hpc migrate.\n{text}")
        print(f"wrote {arguments.out}")
    if translation.untranslated:
        print("# No counterpart:")
        for one in translation.untranslated:
            print(f"#   {one.key}: {one.value}\n#     {one.reason}")
    try:
        build_recipe(translation.recipe)
    except RecipeError as error:
        print("# Before it can run:")
        for problem in error.problems:
            print(f"#   {problem.key}: {problem.message}\n#     try: {problem.hint}")
    return 0

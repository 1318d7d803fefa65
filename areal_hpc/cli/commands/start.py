"""`areal-hpc recipes` and `init`: shipped recipes, and a project that begins as one."""

import argparse
import shlex
from pathlib import Path

from areal_hpc.checkout import find_checkout, format_install_command
from areal_hpc.cli.arguments import CommandGroup
from areal_hpc.errors import Problem, RecipeError


def add_commands(commands: CommandGroup) -> None:
    commands.add_command(
        "recipes",
        _print_recipes,
        help="list the recipes that ship with the package",
        description="List the shipped recipes: name, hardware, wall time and purpose. A command "
        "that takes a recipe also takes such a name, as does `extends` at the top of a recipe.",
        example="areal-hpc recipes",
    )
    init = commands.add_command(
        "init",
        _write_project,
        help="begin a project: a recipe and its agent",
        description="Write a recipe and the code that it names into a folder: those of the "
        "tutorial, or of a shipped recipe. Both run as they are. No file is overwritten.",
        example="areal-hpc init my_project\nareal-hpc init my_project --like quickstart",
    )
    init.add_argument("folder", type=Path, metavar="DIR", help="folder to write into")
    like = "a shipped recipe (areal-hpc recipes); the tutorial's without this"
    init.add_argument("--like", metavar="NAME", help=like)


def _print_recipes(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.shipped import list_shipped_recipes, parse_header
    from areal_hpc.view.tables import format_table

    rows = [("name", "hardware", "wall time", "purpose")]
    for name, path in list_shipped_recipes().items():
        header = parse_header(path.read_text())
        rows.append((name, header.hardware, header.wall_time, header.purpose))
    print("\n".join(format_table(rows)))
    return 0


def _write_project(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.project_files import read_project_files

    project = read_project_files(arguments.like)
    targets = {arguments.folder / name: content for name, content in project.contents.items()}
    if there := [path for path in targets if path.exists()]:
        raise RecipeError.from_problems(
            Problem(f"there is a file {path} already", "DIR", "name another folder")
            for path in there
        )
    for path, content in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(f"wrote    {path}")
    has_hub_model = load_recipe(arguments.folder / project.recipe).model.hub is not None
    _print_next_commands(arguments.folder, project.recipe, has_hub_model)
    return 0


def _print_next_commands(folder: Path, recipe: str, has_hub_model: bool) -> None:
    print(f"next     cd {shlex.quote(str(folder))}")
    if find_checkout() is None:
        print(f"         {format_install_command('main')}")
        print(f"         {format_install_command('serve')}  # in an environment of its own:")
        print("         # add cluster.serve.python=PATH/bin/python to what follows")
    for command in (*(["prefetch"] if has_hub_model else []), "plan", "try", "run"):
        print(f"         areal-hpc {command} {recipe}")

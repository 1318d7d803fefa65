"""`areal-hpc make-tiny-model`, `prefetch`, `install-harness` and `migrate`: what a run needs."""

import argparse
import sys
from pathlib import Path

from areal_hpc.checkout import get_shipped_dir
from areal_hpc.cli.arguments import CommandGroup, parse_positive_int
from areal_hpc.errors import RecipeError


def add_commands(commands: CommandGroup) -> None:
    tiny = commands.add_command(
        "make-tiny-model",
        _write_tiny_model,
        help="make a tiny random Qwen3 with its own tokenizer",
        description="Make a tiny, randomly initialized Qwen3 in Hugging Face format. Its "
        "byte-level BPE tokenizer is trained on the text you give.",
        example="areal-hpc make-tiny-model --out /tmp/tiny",
    )
    tiny.add_argument("--out", type=Path, required=True, help="directory to make")
    texts = "text file, one sample a line; the quick-start's demonstrations when absent"
    tiny.add_argument("--texts", type=Path, help=texts)
    tiny.add_argument("--seed", type=int, default=1, help="seed of the weights (%(default)s)")
    commands.add_command(
        "prefetch",
        _prefetch_files_and_install_harnesses,
        ["recipe", "overrides"],
        help="download the models, data sets and harnesses of a recipe",
        description="Put the models and data sets of a recipe into the Hugging Face cache, write "
        "their revisions and digests into the run directory, and install the coding harnesses "
        "that its agents run. For a login node: runs never "
        "download. HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are honored.",
        example="areal-hpc prefetch recipes/gpu64_math_qwen2.5_7b.yaml",
    )
    harness = commands.add_command(
        "install-harness",
        _install_harnesses,
        help="install coding harnesses for HarnessAgent",
        description="Install coding harnesses (claude-code, codex, opencode and others; "
        "docs/harnesses.md) from npm or PyPI, each in a folder of its own, with the exact "
        "packages of its lock. One that is there already is left as it is.",
        example="areal-hpc install-harness opencode",
    )
    harness.add_argument("names", nargs="+", metavar="NAME", help="a harness, or all")
    harness.add_argument("--dir", type=Path, help="their folder (.venvs/harnesses of the checkout)")
    version = "another version than the lock's, or `newest`; untested, and its packages unpinned"
    harness.add_argument("--version", default="", help=version)
    migrate = commands.add_command(
        "migrate",
        _translate_areal_config,
        help="translate an AReaL configuration into a recipe",
        description="Print the recipe for an AReaL configuration, every key without a "
        "counterpart and why, and what the recipe still needs.",
        example="areal-hpc migrate gsm8k_grpo.yaml --rows 7473 --out my_recipe.yaml",
    )
    migrate.add_argument("config", type=Path, help="the file that AReaL's --config names")
    help_ = "as AReaL takes them"
    migrate.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help_)
    rows = "number of training rows, to convert epochs to steps"
    migrate.add_argument("--rows", type=parse_positive_int, help=rows)
    migrate.add_argument("--out", type=Path, help="write the recipe there instead of printing it")


def _write_tiny_model(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.tiny_model import make_tiny_model

    make_tiny_model(
        arguments.out, _read_tokenizer_training_texts(arguments.texts), seed=arguments.seed
    )
    print(f"made a tiny Qwen3 in {arguments.out}")
    return 0


def _read_tokenizer_training_texts(path: Path | None) -> list[str]:
    if path is not None:
        if not path.is_file():
            raise RecipeError(f"there is no text file at {path}", key="--texts")
        try:
            return path.read_text().splitlines()
        except UnicodeDecodeError as error:
            hint = "save it as UTF-8"
            raise RecipeError(f"{path} is no text: {error}", key="--texts", hint=hint) from error
    from areal_hpc.dataset.sources import iterate_task_rows
    from areal_hpc.recipe.sections.dataset import TaskSetConfig

    sys.path.append(str(get_shipped_dir()))
    source = TaskSetConfig(
        generator="examples.quickstart.task:demonstrations", kwargs={"size": 2000, "seed": 1}
    )
    return [
        message["content"]
        for row in iterate_task_rows(source, "--texts")
        for message in row["messages"]
    ]


def _prefetch_files_and_install_harnesses(arguments: argparse.Namespace) -> int:
    from areal_hpc.agents.harness.installation import (
        install_harness_if_outdated,
        list_recipe_harnesses,
    )
    from areal_hpc.launch.prefetch import prefetch_files_and_build_images
    from areal_hpc.launch.terminal import say
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.rundir.paths import RunPaths

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    paths = RunPaths(recipe.run_dir)
    for name, folder in list_recipe_harnesses(recipe):
        _print_install_result(name, folder, install_harness_if_outdated(name, folder))
    prefetch_files_and_build_images(recipe, paths, say)
    print(f"everything is in the cache; recorded in {paths.prefetch_record}")
    return 0


def _install_harnesses(arguments: argparse.Namespace) -> int:
    from areal_hpc.agents.harness.installation import (
        HARNESSES_DIR,
        install_harness_if_outdated,
        query_newest_version,
    )
    from areal_hpc.agents.harness.programs import HARNESSES

    folder = (arguments.dir or HARNESSES_DIR).absolute()
    for name in HARNESSES if arguments.names == ["all"] else arguments.names:
        version = arguments.version
        if version == "newest":
            version = query_newest_version(name)
        _print_install_result(name, folder, install_harness_if_outdated(name, folder, version))
    return 0


def _print_install_result(harness_name: str, folder: Path, is_new: bool) -> None:
    verb = "is installed in" if is_new else "was there already:"
    print(f"{harness_name} {verb} {folder / harness_name}")


def _translate_areal_config(arguments: argparse.Namespace) -> int:
    import yaml

    from areal_hpc.areal.config.translation import translate_to_recipe
    from areal_hpc.areal.loading import read_areal_config_file
    from areal_hpc.recipe.loading import build_recipe

    translation = translate_to_recipe(
        read_areal_config_file(arguments.config, arguments.overrides), arguments.rows
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

"""`areal-hpc try`: trial episodes of an agent, before anything costs money."""

import argparse
from functools import partial
from pathlib import Path

from areal_hpc.cli.arguments import CommandGroup, parse_run_dir
from areal_hpc.errors import RecipeError, RunInterruptedError


def add_commands(commands: CommandGroup) -> None:
    trial = commands.add_command(
        "try",
        _run_trial_episodes,
        ["recipe", "overrides"],
        help="let a recipe's agent play some tasks, without a model",
        description="Play the first training tasks with the recipe's agent, through the real "
        "proxy, and print each conversation, its reward and the rows it would become. The model's "
        "replies are random tokens unless --from or --base-url says otherwise. Nothing is kept. "
        "Exits with 70 if the agent failed.",
        example="areal-hpc try recipes/quickstart.yaml\n"
        "areal-hpc try my_recipe.yaml -n 5 rollout.workflow=my_package.MyAgent\n"
        "areal-hpc try my_recipe.yaml --from runs/mine/first",
    )
    add = trial.add_argument
    add("-n", "--tasks", type=int, default=3, metavar="N", help="tasks to play (%(default)s)")
    source = trial.add_mutually_exclusive_group()
    replay = "replay the replies that a run recorded"
    source.add_argument("--from", dest="recorded_run", type=Path, metavar="RUN", help=replay)
    server = "a running SGLang, or a server with OpenAI's /v1/completions, generates the replies"
    source.add_argument("--base-url", metavar="URL", help=server)


def _run_trial_episodes(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.trial.start import run_trial
    from areal_hpc.recipe.loading import load_recipe

    if arguments.tasks < 1:
        raise RecipeError(f"expected 1 task or more, got {arguments.tasks}", key="--tasks")
    run = arguments.recorded_run
    try:
        return run_trial(
            load_recipe(arguments.recipe, arguments.overrides),
            tasks=arguments.tasks,
            print_line=partial(print, flush=True),
            recorded_run=run and parse_run_dir(run).root,
            base_url=arguments.base_url,
        )
    except KeyboardInterrupt:
        return RunInterruptedError.exit_code

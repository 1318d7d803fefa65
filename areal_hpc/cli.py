"""`areal-hpc`: the command line."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from areal_hpc import __version__
from areal_hpc.errors import ArealError
from areal_hpc.layout import RunLayout

INTERRUPTED_EXIT_CODE = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, run the command, exit with its code."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        sys.exit(command(arguments))
    except ArealError as error:
        print(_as_message(error), file=sys.stderr)
        sys.exit(getattr(error, "code", error.exit_code))
    except BrokenPipeError:
        sys.exit(0)  # the reader (head, less) has seen enough


def _as_message(error: ArealError) -> str:
    count = len(error.problems)
    head = "error:" if count == 1 else f"{count} errors:"
    return f"{head} {error}" if count == 1 else f"{head}\n{error}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="areal-hpc", description="Reinforcement learning of LLM agents on Slurm clusters."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="train a recipe in the foreground",
        description="Train a recipe in the foreground. Run it again to continue where it stopped.",
    )
    run.add_argument("recipe", type=Path)
    run.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.total_steps=10")
    run.add_argument(
        "--fresh", action="store_true", help="move an existing run directory aside and start anew"
    )
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="print the jobs of a recipe without starting them")
    plan.add_argument("recipe", type=Path)
    plan.add_argument("overrides", nargs="*", metavar="key=value")
    plan.set_defaults(command=_plan)

    status = commands.add_parser("status", help="summary of a run so far")
    status.add_argument("run", type=Path, help="a run directory")
    status.set_defaults(command=_status)

    keys = commands.add_parser("keys", help="every key of a recipe, as a Markdown table")
    keys.set_defaults(command=_keys)

    _add_model_commands(commands)
    _add_shards_commands(commands)
    return parser


def _add_model_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    model = commands.add_parser("model", help="make models")
    kinds = model.add_subparsers(required=True, metavar="KIND")
    tiny = kinds.add_parser(
        "tiny",
        help="a tiny, randomly initialised Qwen3 with its own tokenizer",
        description="Make a tiny, randomly initialised Qwen3 in Hugging Face format. Its "
        "byte-level BPE tokenizer is trained on the text you give.",
    )
    tiny.add_argument("--out", type=Path, required=True, help="directory to make")
    tiny.add_argument(
        "--texts",
        type=Path,
        help="text file, one sample a line; the quick-start's demonstrations when absent",
    )
    tiny.add_argument("--seed", type=int, default=1)
    tiny.set_defaults(command=_model_tiny)


def _add_shards_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> None:
    shards = commands.add_parser("shards", help="look at recorded trajectories")
    verbs = shards.add_subparsers(required=True, metavar="VERB")
    listing = verbs.add_parser("ls", help="one line per sealed shard")
    listing.add_argument("run", type=Path, help="a run directory")
    listing.set_defaults(command=_shards_ls)
    show = verbs.add_parser("show", help="one trajectory, token by token")
    show.add_argument("run", type=Path, help="a run directory, or one shard file")
    show.add_argument("row", type=int, help="row, counted over the run's shards (or in the file)")
    show.set_defaults(command=_shards_show)
    verify = verbs.add_parser("verify", help="check every digest; name every damaged file")
    verify.add_argument("run", type=Path, help="a run directory")
    verify.set_defaults(command=_shards_verify)


def _run(arguments: argparse.Namespace) -> int:
    # Imported here: `--help` and the shard commands stay quick without pydantic and submitit.
    from areal_hpc import launch
    from areal_hpc.recipe import load
    from areal_hpc.view.progress import LiveReporter, PlainReporter

    recipe = load(arguments.recipe, arguments.overrides)
    layout = RunLayout(recipe.run_dir.resolve())
    if launch.is_finished(recipe, layout) and not arguments.fresh:
        print(_summary(layout))
        print(f"\nthis run is finished; to start anew: {_program()} run {arguments.recipe} --fresh")
        return 0
    stop = threading.Event()
    _stop_on_signals(stop)
    reporter_class = LiveReporter if sys.stdout.isatty() else PlainReporter
    warmup_steps = recipe.warmup.total_steps if recipe.warmup else 0
    reporter = reporter_class(layout, recipe.trainer.total_steps, warmup_steps)
    reporter.say(f"run      {layout.root}")
    try:
        launch.run(
            recipe, command_line=sys.argv, reporter=reporter, stop=stop, fresh=arguments.fresh
        )
    except launch.Interrupted:
        reporter.close()
        print("stopped; the same command continues the run")
        return INTERRUPTED_EXIT_CODE
    finally:
        reporter.close()
    print(_summary(layout))
    return 0


def _stop_on_signals(stop: threading.Event) -> None:
    def ask(number: int, frame: FrameType | None) -> None:
        if not stop.is_set():
            print("\nstopping: jobs get a moment to commit", file=sys.stderr)
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def _summary(layout: RunLayout) -> str:
    from areal_hpc.view.curve import draw_curve
    from areal_hpc.view.snapshot import read_snapshot
    from areal_hpc.view.summary import summarise

    snapshot = read_snapshot(layout)
    if snapshot.steps:
        draw_curve(snapshot, f"{layout.root.parent.name} / {layout.root.name}", layout.curve)
    return summarise(layout, snapshot, _program())


def _program() -> str:
    """How the user called this command line."""
    path = Path(sys.argv[0])
    return "python -m areal_hpc" if path.name == "__main__.py" else str(path)


def _plan(arguments: argparse.Namespace) -> int:
    from areal_hpc.plan import Facts, plan
    from areal_hpc.recipe import load

    recipe = load(arguments.recipe, arguments.overrides)
    layout = RunLayout(recipe.run_dir)
    for stage in plan(recipe, layout, Facts(0, 0, "python", ())).stages:
        print(f"stage {stage.name}: complete when {stage.done_marker} exists")
        for job in stage.jobs:
            print(f"  job {job.name}: {job.tasks} task{'s' if job.tasks > 1 else ''}")
            for process in job.processes:
                where = "first task" if process.first_task_only else "every task"
                print(f"    {process.name:<10} {process.role:<7} {where:<11} {process.entry}")
    return 0


def _keys(arguments: argparse.Namespace) -> int:
    from areal_hpc.recipe import describe_keys

    print(describe_keys(), end="")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    print(_summary(_existing_run(arguments.run)))
    return 0


def _existing_run(path: Path) -> RunLayout:
    from areal_hpc.errors import RecipeError

    layout = RunLayout(path.resolve())
    if not layout.recipe.exists():
        raise RecipeError(
            f"there is no run at {path}", hint="give a directory that holds a recipe.yaml"
        )
    return layout


def _model_tiny(arguments: argparse.Namespace) -> int:
    from areal_hpc.tiny_model import make_tiny_model

    make_tiny_model(arguments.out, _texts(arguments.texts), seed=arguments.seed)
    print(f"made a tiny Qwen3 in {arguments.out}")
    return 0


def _texts(path: Path | None) -> list[str]:
    """The lines of a file, or the quick start's demonstrations."""
    from areal_hpc.errors import RecipeError

    if path is not None:
        if not path.is_file():
            raise RecipeError(f"there is no text file at {path}", key="--texts")
        return path.read_text().splitlines()
    try:
        from areal_hpc.dataset import DatasetConfig, rows

        sys.path.insert(0, str(Path.cwd()))
        source = DatasetConfig(
            generator="examples.quickstart.task:demonstrations", kwargs={"size": 2000, "seed": 1}
        )
        return [
            message["content"] for row in rows(source, "--texts") for message in row["messages"]
        ]
    except RecipeError as error:
        raise RecipeError(
            "the quick start's demonstrations are found only in a checkout",
            key="--texts",
            hint="start this in the checkout, or give --texts FILE",
        ) from error


def _shards_ls(arguments: argparse.Namespace) -> int:
    from areal_hpc.shards.report import list_shards

    print(list_shards(_existing_run(arguments.run), _version_text))
    return 0


def _shards_show(arguments: argparse.Namespace) -> int:
    from areal_hpc.shards.report import show_trajectory

    path = arguments.run.resolve()
    run_dir = path.parent.parent if path.is_file() else path
    print(show_trajectory(path, arguments.row, _tokenizer_of(RunLayout(run_dir)), _version_text))
    return 0


def _shards_verify(arguments: argparse.Namespace) -> int:
    from areal_hpc.errors import ShardError
    from areal_hpc.shards.report import describe_verification
    from areal_hpc.shards.verify import verify_run

    report = verify_run(_existing_run(arguments.run))
    print(describe_verification(report))
    return ShardError.exit_code if report.problems else 0


def _version_text(packed: int) -> str:
    from areal_hpc.weights.version import WeightVersion

    return str(WeightVersion.unpack(packed))


def _tokenizer_of(layout: RunLayout) -> Path | None:
    """The tokenizer file of the model that a run trains, if it can be found."""
    from areal_hpc.recipe import load

    folders = [layout.export("warmup"), layout.tiny_model_dir]
    if layout.recipe.exists():
        named = load(layout.recipe).model.path
        folders += [named] if named else []
    files = (folder / "tokenizer.json" for folder in folders)
    return next((file for file in files if file.is_file()), None)

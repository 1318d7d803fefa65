"""Commands on a run: cancel, start, resume, caretaker, quarantine, export, rejudge, replay."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from areal_hpc.checkout import format_install_command
from areal_hpc.cli.arguments import (
    OVERRIDES,
    RUN,
    UNHEALTHY_EXIT_CODE,
    CommandTable,
    argument,
    flag,
    parse_positive_int,
    parse_run_dir,
    parse_step_range,
)
from areal_hpc.errors import ClusterError, RecipeError, RunInterruptedError, SlurmTimeoutError
from areal_hpc.rundir.paths import RunPaths, format_step_dir

STOP_MARGIN_S = 10.0
"""Seconds added to a job's grace: the stop reaches the job late, and its end reaches Slurm late."""

commands = CommandTable()


def _require_own_run(path: Path) -> RunPaths:
    paths = parse_run_dir(path)
    if not os.access(paths.root, os.W_OK):
        raise ClusterError(
            f"this run belongs to user {paths.root.stat().st_uid}, who alone may change it",
            key=str(paths.root),
            hint="log in as that user; status, why, logs and audit need no more than reading",
        )
    return paths


def _require_own_slurm_run(path: Path) -> RunPaths:
    from areal_hpc.launch.prepare import find_live_jobs
    from areal_hpc.slurm.run_jobs import (
        find_original,
        list_recorded_job_ids,
        was_submission_refused_recently,
    )
    from areal_hpc.view.formatting import get_program_command

    paths = _require_own_run(path)
    if not (
        list_recorded_job_ids(paths)
        or was_submission_refused_recently(paths)
        or find_live_jobs(paths)
    ):
        raise ClusterError(
            "this run has no Slurm jobs",
            hint="it runs in the foreground: stop it with Ctrl-C, continue it with "
            f"{get_program_command()} run",
        )
    original = None
    with suppress(SlurmTimeoutError):  # jobs of another run are not touched anyway
        original = find_original(paths)
    if original is not None:
        raise ClusterError(
            f"this folder is a copy of {original}, whose jobs wait or run",
            key=str(paths.root),
            hint=f"name that run: {shlex.quote(str(original))}; or make this a run of its own: "
            f"areal-hpc resume {shlex.quote(str(paths.root))} --as NAME",
        )
    return paths


@commands.add("cancel", RUN, flag("--now", "cancel without a grace period; no final checkpoint"))
def _cancel_run(arguments: argparse.Namespace) -> int:
    """Cancel all jobs of a run.

    Running jobs save a checkpoint and exit; those that take longer than cluster.stop_grace_s
    and the time of the last save are cancelled. Pending and held jobs are cancelled at once;
    nothing is requeued.

    $ areal-hpc cancel runs/math/first
    """
    from areal_hpc.jobs.starts import read_checkpoint_duration_s
    from areal_hpc.rundir.jobs import get_latest_submissions, mark_cancelled, read_submissions
    from areal_hpc.rundir.run_inputs import read_run_recipe
    from areal_hpc.slurm.run_jobs import (
        cancel_jobs,
        is_job_of_run,
        list_recorded_job_ids,
        list_unrecorded_live_jobs,
    )
    from areal_hpc.view.formatting import format_next_command, say

    paths = _require_own_slurm_run(arguments.run)
    grace_s = 0.0
    if not arguments.now:
        grace_s = read_run_recipe(paths.recipe)["cluster"]["stop_grace_s"] + STOP_MARGIN_S
        jobs = get_latest_submissions(read_submissions(paths.submissions))
        grace_s += max((read_checkpoint_duration_s(paths.job(name)) for name in jobs), default=0.0)
    # Before any signal: a job that receives one looks for the marker.
    mark_cancelled(paths.cancelled_marker, without_checkpoint=arguments.now)

    def find_jobs() -> tuple[str, ...]:
        unrecorded = [job.slurm_record.job_id for job in list_unrecorded_live_jobs(paths)]
        return (*list_recorded_job_ids(paths), *unrecorded)

    try:
        ended = cancel_jobs(
            find_jobs, is_own=partial(is_job_of_run, paths), grace_s=grace_s, print_line=say
        )
    except KeyboardInterrupt:
        say(f"interrupted; the run is marked as cancelled: {format_next_command('cancel', paths)}")
        return RunInterruptedError.exit_code
    print(f"cancelled {ended} jobs; none are left" if ended else "there were no jobs to cancel")
    return 0


@commands.add(
    "start",
    argument(
        "words",
        "claude-code, codex, gemini-cli, qwen-code or opencode, then a run or a model's directory, "
        "`--`, and further arguments of the program; or a run or a model, `--`, and any command",
        nargs="*",
        default=[],
        metavar="HARNESS RUN|MODEL",
    ),
    flag(
        "--print-env",
        "print the variables in place of starting a program, and wait for Enter or Ctrl-C",
    ),
    argument("--recipe", "the recipe by which a model is served", type=Path),
)
def _start_program(arguments: argparse.Namespace) -> int:
    """Open your own coding harness on a live run's policy or on a model, and judge it.

    Its session is recorded with your verdict as the reward: as an episode of the run if that has
    rollout.agent.mode=online and train_on=people, else apart from what is trained. A model is
    served on this machine until the program ends. Your own settings of the program are not changed.

    $ areal-hpc start claude-code runs/math/first
    $ areal-hpc start claude-code my_model --recipe my_recipe.yaml
    $ areal-hpc start claude-code runs/math/first -- --resume
    $ areal-hpc start runs/math/first -- aider --model openai/default
    """
    from areal_hpc.agents.harness.personal_session import find_terminal_use, hold_session
    from areal_hpc.agents.harness.programs import HARNESSES
    from areal_hpc.launch.serving import build_serving_recipe, serve_model
    from areal_hpc.view.formatting import say

    words = [*arguments.words]
    first = words[0] if words else ""
    is_harness = first in HARNESSES or not ("/" in first or Path(first).exists())
    harness = words.pop(0) if is_harness else ""
    if not words or not (harness or words[1:] or arguments.print_env):
        raise RecipeError(
            "expected a harness and a run or a model, or a run or a model and a command, got "
            f"{first or 'nothing'}",
            key="HARNESS RUN|MODEL",
            hint="areal-hpc start claude-code RUN, or areal-hpc start RUN -- COMMAND",
        )
    directory = Path(words.pop(0))
    use = find_terminal_use(harness, words)
    if RunPaths(directory).recipe.exists():
        if arguments.recipe is not None:
            raise RecipeError("a run has its own recipe", key="--recipe", hint="leave it out")
        hold_session(_require_own_run(directory), use, words, only_prints=arguments.print_env)
        return 0
    with serve_model(build_serving_recipe(directory, arguments.recipe), say) as paths:
        hold_session(paths, use, words, only_prints=arguments.print_env)
    return 0


@commands.add(
    "resume",
    RUN,
    OVERRIDES,
    argument(
        "--as",
        "make a copy of a run's folder a run of its own, under this name beside the copy",
        dest="trial_name",
        metavar="NAME",
    ),
)
def _resume_run(arguments: argparse.Namespace) -> int:
    """Resubmit a run from its last checkpoint.

    It uses the recipe of the run with the overrides given here, in the directory of the first
    submission.

    $ areal-hpc resume runs/math/first trainer.total_steps=200
    $ cp -a runs/math/first copy; areal-hpc resume copy --as second
    """
    from areal_hpc.launch import slurm_launcher
    from areal_hpc.launch.prepare import is_run_finished
    from areal_hpc.launch.provenance import enter_launch_folder
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.rundir.jobs import CARETAKER_JOB, read_submissions
    from areal_hpc.rundir.rendezvous import EVALUATION_CELL
    from areal_hpc.slurm.run_jobs import list_live_jobs
    from areal_hpc.view.formatting import format_next_command, say

    if arguments.trial_name is not None:
        from areal_hpc.launch.prepare import make_run_of_copy

        paths = make_run_of_copy(RunPaths(arguments.run.resolve()), arguments.trial_name)
        say(f"copy     is the run {paths.root} now")
    else:
        paths = _require_own_slurm_run(arguments.run)
    jobs = {submission.job for submission in read_submissions(paths.submissions)}
    if jobs - {CARETAKER_JOB} == {EVALUATION_CELL}:
        raise RecipeError(
            "this is the evaluation of a model, not a training run",
            key=str(paths.root),
            hint="repeat the areal-hpc eval command: it plays what has no result yet",
        )
    enter_launch_folder(paths)
    if arguments.overrides and (live := list_live_jobs(paths)):
        names = ", ".join(f"{job.submission.job} ({job.submission.job_id})" for job in live)
        raise RecipeError(
            f"the recipe cannot change while jobs of the run wait or run: {names}",
            key=" ".join(arguments.overrides),
            hint=f"areal-hpc cancel {shlex.quote(str(paths.root))}, then repeat this command",
        )
    recipe = load_recipe(paths.recipe, arguments.overrides)
    own_name = (recipe.experiment_name, recipe.trial_name)
    sets_root = any(override.startswith("cluster.fileroot=") for override in arguments.overrides)
    if not sets_root and not recipe.run_dir.exists() and paths.root.parts[-2:] == own_name:
        _cancel_old_jobs(paths, recipe.run_dir.resolve())
        fileroot = f"cluster.fileroot={json.dumps(str(paths.root.parents[1]))}"
        recipe = load_recipe(paths.recipe, [*arguments.overrides, fileroot])
    if recipe.run_dir.resolve() != paths.root:
        raise RecipeError(
            f"with these overrides the run directory would be {recipe.run_dir.resolve()}",
            key="cluster.fileroot, experiment_name, trial_name",
            hint="use `areal-hpc submit` to start a run under another name",
        )
    if is_run_finished(recipe, paths):
        print("this run is finished; for more steps set trainer.total_steps=...")
        return 0
    slurm_launcher.submit(recipe, print_line=say, joins_live_jobs=True)
    print(f"next     {format_next_command('status', paths)}")
    return 0


@commands.add("caretaker", RUN)
def _look_after_run(arguments: argparse.Namespace) -> int:
    """Submit the jobs of a run again that have ended for good.

    It looks once a minute until the run is finished, cancelled or given up, and submits what no
    job of the run can submit, as where only login nodes may. What a person cancelled stays
    cancelled.

    $ areal-hpc caretaker runs/math/first
    """
    from areal_hpc.jobs.caretaker import look_after_run
    from areal_hpc.view.formatting import say

    paths = _require_own_slurm_run(arguments.run)
    try:
        look_after_run(paths, say)
    except KeyboardInterrupt:
        return RunInterruptedError.exit_code
    print("no job of this run is there, and none will be submitted again")
    return 0


def _cancel_old_jobs(paths: RunPaths, old_dir: Path) -> None:
    """Cancel the jobs of a run that was moved, which wait for a folder that is not there."""
    from areal_hpc.slurm.run_jobs import cancel_jobs, is_job_of_run, list_live_jobs
    from areal_hpc.slurm.states import JobPhase
    from areal_hpc.view.formatting import say

    live = [job.slurm_record for job in list_live_jobs(paths)]
    if running := [job.job_id for job in live if job.state.phase is not JobPhase.WAITING]:
        raise ClusterError(
            f"jobs of this run work in {old_dir}, which is not there on this host: "
            f"{', '.join(running)}",
            key=str(paths.root),
            hint="use a host that has that folder; jobs of a moved run end within a minute",
        )
    say(f"moved    from {old_dir}; jobs that wait for that folder are cancelled")
    ids = tuple(job.job_id for job in live)
    is_own = partial(is_job_of_run, paths)
    cancel_jobs(lambda: ids, is_own=is_own, grace_s=0.0, print_line=say)


@commands.add(
    "quarantine",
    RUN,
    argument("batch", "the step it leads to", type=int, metavar="BATCH"),
    flag("--undo", "train the batch after all, if nothing was trained since"),
)
def _quarantine_batch(arguments: argparse.Namespace) -> int:
    """Set a batch aside that cannot be trained.

    The trainer consumes it without training on it, at once or when the run is resumed. The
    audit counts its tickets as quarantined. A batch that was trained already is refused.

    $ areal-hpc quarantine runs/math/first 17
    """
    from areal_hpc.launch.quarantine import quarantine_batch, undo_quarantine

    paths = parse_run_dir(arguments.run)
    act = undo_quarantine if arguments.undo else quarantine_batch
    try:
        print(act(paths, arguments.batch))
    except OSError as error:
        raise ClusterError(
            f"the run directory cannot be read or written: {error}",
            key=str(paths.root),
            hint="check free space, quota and permissions",
        ) from error
    return 0


@commands.add(
    "export",
    RUN,
    argument("--step", "step of the checkpoint (default: the newest)", type=int),
    argument(
        "--out",
        "output directory (default: export/step_... in the run directory)",
        type=Path,
        metavar="DIR",
    ),
)
def _export_model(arguments: argparse.Namespace) -> int:
    """Export a checkpoint as a Hugging Face model.

    It may have been trained in any parallel layout. The tokenizer is included.

    $ areal-hpc export runs/quickstart/demo --step 20 --out my_model
    """
    from areal_hpc.launch.plan import get_initial_policy_path
    from areal_hpc.recipe.loading import load_recipe

    paths = parse_run_dir(arguments.run)
    recipe = load_recipe(paths.recipe)
    out: Path | None = arguments.out
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(
            f"something is already at {out}",
            key="--out",
            hint="choose a directory that does not exist",
        )
    if find_spec("torch") is None:
        return _export_in_train_environment(recipe.cluster.train.python, arguments)
    from areal_hpc.trainer.checkpoints.export import choose_checkpoint, export_checkpoint

    checkpoint = choose_checkpoint(paths.checkpoints_dir, arguments.step)
    target = (out or paths.export_dir(format_step_dir(checkpoint.state.step))).resolve()
    print(f"exporting step {checkpoint.state.step} of {paths.root}", flush=True)
    base = get_initial_policy_path(recipe, paths)
    lora = recipe.trainer.lora
    export_checkpoint(checkpoint, base, target, partial(print, flush=True), lora=lora)
    print(target)
    return 0


def _export_in_train_environment(configured_python: str, arguments: argparse.Namespace) -> int:
    from areal_hpc.jobs.config import get_interpreter

    python = get_interpreter("train", configured_python)
    if Path(python).absolute() == Path(sys.executable).absolute():
        raise RecipeError(
            f"{python} has no torch, which is needed to read checkpoints",
            key="cluster.train.python",
            hint=f"{format_install_command('main')}, or name the trainer's Python in the recipe",
        )
    command = [python, "-m", "areal_hpc", "export", str(arguments.run)]
    if arguments.step is not None:
        command += ["--step", str(arguments.step)]
    if arguments.out is not None:
        command += ["--out", str(arguments.out)]
    return subprocess.run(command, check=False).returncode


STEPS = argument(
    "--steps", "10..20 or 10:20, or one step; all recorded ones when absent", type=parse_step_range
)


@commands.add(
    "rejudge",
    RUN,
    argument("--reward", "reward function", required=True, metavar="MODULE:FUNCTION"),
    STEPS,
    argument("--only", "failed: episodes whose recorded reward is 0 or less", choices=["failed"]),
    argument("--timeout", "seconds of one call", type=parse_positive_int, default=60),
)
def _rejudge_episodes(arguments: argparse.Namespace) -> int:
    """Judge the episodes of trained batches by another reward function.

    It needs no GPU and no server. The new rewards are written beside the recorded ones, and the
    differences are printed. The same command again judges only episodes without a new reward.
    Exits with 1 if the function failed.

    $ areal-hpc rejudge runs/quickstart/demo --reward my_rewards:strict --steps 1..10
    """
    import asyncio

    from areal_hpc.launch.rejudge import describe_changes, rejudge_steps
    from areal_hpc.launch.replay import find_step_range, list_trained_steps
    from areal_hpc.view.formatting import format_answer, say

    run, function = parse_run_dir(arguments.run), arguments.reward
    sys.path.insert(0, str(Path.cwd()))  # the function's module may lie here
    episodes = asyncio.run(
        rejudge_steps(
            run,
            function,
            list_trained_steps(run, *(arguments.steps or find_step_range(run))),
            only_failed=arguments.only == "failed",
            timeout_s=arguments.timeout,
            print_line=say,
        )
    )
    answer = describe_changes(episodes, run, function)
    print("\n".join(format_answer(answer, shlex.quote(str(arguments.run)))))
    print(f"rewards  {run.rejudged_rewards(function)}")
    return 0 if answer.is_well else UNHEALTHY_EXIT_CODE


@commands.add(
    "replay",
    RUN,
    STEPS,
    argument(
        "--rewards", "train on rewards of areal-hpc rejudge", default="", metavar="MODULE:FUNCTION"
    ),
    argument(
        "--out", "directory to make; RUN.replay_FIRST_LAST when absent", type=Path, metavar="DIR"
    ),
    OVERRIDES,
)
def _replay_steps(arguments: argparse.Namespace) -> int:
    """Train recorded steps again, without inference.

    From manifests and shards, in a new directory; the run is only read. Without learning
    overrides, loss and gradient norm are compared with the recorded ones.

    $ areal-hpc replay runs/quickstart/demo --steps 3..5 trainer.optimizer.lr=1e-4
    $ areal-hpc replay runs/math/first --rewards mine:strict trainer.objective.preset=gspo
    """
    from areal_hpc.jobs.processes.process_setup import catch_stop_signals
    from areal_hpc.launch.foreground_launcher import STOPPING_MESSAGE
    from areal_hpc.launch.replay import RecordedStepsReplay, find_step_range
    from areal_hpc.view.state.live_progress import PlainReporter

    run, rewards = parse_run_dir(arguments.run), arguments.rewards
    first, last = arguments.steps or find_step_range(run, rewards)
    ending = "_".join([str(first), str(last), *rewards.split(":")[1:]])
    out = arguments.out or run.root.with_name(f"{run.root.name}.replay_{ending}")
    paths = RunPaths(out.resolve())
    replay = RecordedStepsReplay(run, first, last, arguments.overrides, paths, rewards)
    reporter = PlainReporter(paths, last, 0)
    reporter.print_line(f"replay   steps {first} to {last} of {run.root}")
    try:
        with catch_stop_signals(STOPPING_MESSAGE) as stop:
            replay.replay(reporter, stop)
    except RunInterruptedError as interrupted:
        print("stopped; the same command continues the replay")
        return interrupted.exit_code
    print(paths.root)
    return 0

"""`areal-hpc run`, `plan`, `recipe-keys`, `submit` and `proxy`; launch/run.py does the work."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shlex
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import (
    FRESH,
    OVERRIDES,
    RECIPE,
    SITE,
    CommandTable,
    argument,
    flag,
    parse_slurm_job_id,
)
from areal_hpc.errors import RecipeError
from areal_hpc.rundir.paths import RunPaths

if TYPE_CHECKING:
    from areal_hpc.launch.plan import JobStage
    from areal_hpc.recipe.recipe import Recipe
    from areal_hpc.rundir.jobs import JobSpec

_LINE_CHARS = 100

commands = CommandTable()


def describe_plan(recipe: Recipe, *, on_this_machine: bool = True) -> Iterator[str]:
    """Yield lines: each stage's jobs, processes and devices, then their environment and memory.

    With `on_this_machine` they include the GPUs of this machine that each process gets.
    """
    # Imported here: `--help` stays quick without pydantic and submitit.
    from areal_hpc.launch.resources import build_memory_report
    from areal_hpc.recipe.presets import describe_preset

    yield from _describe_stages(recipe, _list_process_lines, on_this_machine=on_this_machine)
    if preset := list(describe_preset(recipe.model_dump(mode="json"))):
        yield from ["", *preset]
    yield from ["", *_describe_environment_variables(recipe), ""]
    yield from build_memory_report(recipe)


def _describe_dry_run(recipe: Recipe, *, on_this_machine: bool) -> Iterator[str]:
    from areal_hpc.launch.resources import build_memory_report

    yield from _describe_stages(recipe, _list_process_names, on_this_machine=on_this_machine)
    yield from (line for line in build_memory_report(recipe) if line.startswith("warning: "))


def _describe_stages(
    recipe: Recipe, list_processes: Callable[[JobSpec], list[str]], *, on_this_machine: bool
) -> Iterator[str]:
    from areal_hpc.launch.plan import plan_run

    for stage in plan_run(recipe, RunPaths(recipe.run_dir)):
        total = sum(job.tasks * job.gpus_per_task for job in stage.jobs)
        needs = f"{_format_count(total, 'GPU')} at once" if total else "no GPU"
        yield f"stage {stage.name}: {needs}; done when {stage.done_marker} exists"
        for described, alike in itertools.groupby(stage.jobs, list_processes):
            jobs = list(alike)
            names = [job.name for job in jobs]
            title = f"job {names[0]}" if len(names) == 1 else f"jobs {names[0]} to {names[-1]}"
            yield f"  {title}: {described[0]}{_describe_node_share(recipe, jobs[0])}"
            yield from (f"    {line}" for line in described[1:])
        if on_this_machine:
            yield from (f"  {line}" for line in _describe_local_gpu_assignment(stage, recipe))


def _get_recipe_arguments(arguments: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return a recipe and its overrides; `sft RECIPE` means that recipe's SFT stage alone."""
    recipe, overrides = arguments.recipe, arguments.overrides
    if recipe == Path("sft") and overrides and "=" not in overrides[0]:
        return Path(overrides[0]), [*overrides[1:], "train_dataset=null"]
    return recipe, overrides


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _describe_devices(job: JobSpec) -> str:
    count = _format_count(job.tasks, "node" if job.is_task_a_node else "task")
    gpus = f"{_format_count(job.gpus_per_task, 'GPU')} each" if job.gpus_per_task else "on the CPU"
    return f"{count}, {gpus}"


def _list_process_names(job: JobSpec) -> list[str]:
    names = ", ".join(process.name for process in job.processes)
    return [f"{_describe_devices(job)}: {names}"]


def _list_process_lines(job: JobSpec) -> list[str]:
    lines = [_describe_devices(job)]
    for process in job.processes:
        tasks = {"all": "every task", "first": "first task"}.get(process.tasks, "others")
        gpus = "uses the GPUs" if process.uses_gpus and job.gpus_per_task else ""
        line = f"{process.name:<10} {process.role:<7} {tasks:<11} {process.entry:<32} {gpus}"
        lines.append(line.rstrip())
    return lines


def _describe_node_share(recipe: Recipe, job: JobSpec) -> str:
    from areal_hpc.launch.resources import add_node_share_options

    if not job.gpus_per_task:
        return ""
    try:
        options = add_node_share_options(recipe, [job]).get_options_of_job(job.name)
    except RecipeError as error:
        return f"; under Slurm not known without {error.problems[0].key}"
    shares = []
    if cpus := options.sbatch.get("cpus-per-task"):
        shares.append(f"{_format_count(int(cpus), 'CPU')} a task")
    if memory := options.sbatch.get("mem"):
        shares.append(f"{memory} of memory a node")
    return f"; under Slurm {', '.join(shares)}" if shares else ""


def _describe_local_gpu_assignment(stage: JobStage, recipe: Recipe) -> Iterator[str]:
    from areal_hpc.launch.job_places import assign_gpus, find_usable_gpus, format_assignment

    try:
        visible = find_usable_gpus(recipe, os.environ)
        if not visible.ids:
            return
        for line in format_assignment(assign_gpus(stage, visible, recipe)):
            yield f"GPUs with areal-hpc run on this machine: {line}"
    except RecipeError as error:
        yield f"areal-hpc run refuses on this machine: {error.problems[0].message}"


def _describe_environment_variables(recipe: Recipe) -> Iterator[str]:
    """Yield lines: variables that processes of each role get beside those of their job.

    Variables of the recipe's own are shown without their values, which may be secrets.
    """
    from areal_hpc.jobs.config import build_role_variables

    yield "environment by role (SGLang has that of agents, whose process starts it, and of serve)"
    for role, variables in build_role_variables(recipe).items():
        shown = [f"{name}={value}" for name, value in variables.items()]
        recipe_variables = getattr(recipe.cluster, role).variables
        shown += [f"{name}=(cluster.{role}.variables)" for name in recipe_variables]
        yield from _wrap_under_title(f"  {role:<7} ", shown or ["nothing"])
    if network := recipe.cluster.slurm.network.build_environment_variables():
        shown = [f"{name}={value}" for name, value in network.items()]
        yield from _wrap_under_title("  all, under Slurm: ", shown)


def _wrap_under_title(title: str, words: Sequence[str]) -> list[str]:
    return textwrap.wrap(
        " ".join(words),
        _LINE_CHARS,
        initial_indent=title,
        subsequent_indent=" " * len(title),
        break_long_words=False,
        break_on_hyphens=False,
    )


@commands.add(
    "run",
    RECIPE,
    OVERRIDES,
    FRESH,
    flag("--dry-run", "print the jobs with their GPUs; start nothing"),
    flag(
        "--in-allocation",
        "run the jobs as steps (srun) of the Slurm allocation that this shell holds",
    ),
)
def _run_recipe(arguments: argparse.Namespace) -> int:
    """Train a recipe on this machine.

    Run the same command again to resume.

    $ areal-hpc run recipes/quickstart.yaml
    $ areal-hpc run my_recipe.yaml trainer.total_steps=50 rollout.n_samples=16
    $ areal-hpc run sft my_recipe.yaml    # its supervised fine-tuning alone
    $ salloc --nodes=2 areal-hpc run my_recipe.yaml --in-allocation
    """
    # Imported here: `--help` and the shard commands stay quick without pydantic and submitit.
    from areal_hpc.launch.run import run
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(*_get_recipe_arguments(arguments))
    if arguments.dry_run:
        lines = _describe_dry_run(recipe, on_this_machine=not arguments.in_allocation)
        if arguments.in_allocation:
            from areal_hpc.jobs.config import get_interpreters
            from areal_hpc.launch.job_places import describe_planned_steps
            from areal_hpc.slurm.scontrol import read_allocation

            allocation, pythons = read_allocation(os.environ), get_interpreters(recipe)
            lines = chain(lines, [""], describe_planned_steps(recipe, allocation, pythons))
        end = f"nothing was started; {_describe_run_dir(recipe, fresh=arguments.fresh)}"
        plan = shlex.join(["areal-hpc", "plan", str(arguments.recipe), *arguments.overrides])
        print(*lines, end, f"{plan} shows processes, environment and memory", sep="\n")
        return 0
    result = run(recipe, fresh=arguments.fresh, in_allocation=arguments.in_allocation)
    return result.exit_code


def _describe_run_dir(recipe: Recipe, *, fresh: bool) -> str:
    from areal_hpc.launch import prepare
    from areal_hpc.view.state.run_view import RunView

    paths = RunPaths(recipe.run_dir.resolve())
    if fresh or not paths.recipe.exists():
        return f"a run would write to {paths.root}"
    if prepare.is_run_finished(recipe, paths):
        prepare.check_finished_recipe(recipe, paths)
        return f"the run in {paths.root} is finished (--fresh starts over)"
    prepare.check_recipe_changes(recipe, paths, print)
    return f"the run in {paths.root} goes on after step {RunView(paths).step} (--fresh starts over)"


@commands.add("plan", RECIPE, OVERRIDES)
def _print_plan(arguments: argparse.Namespace) -> int:
    """Show the jobs, processes, environment and GPU memory of a recipe; start nothing.

    $ areal-hpc plan recipes/gpu64_math_qwen2.5_7b.yaml cluster.gpu_memory_gib=80
    """
    from areal_hpc.recipe.loading import load_recipe

    recipe = load_recipe(*_get_recipe_arguments(arguments))
    print("\n".join(describe_plan(recipe)))
    return 0


@commands.add("recipe-keys")
def _print_recipe_keys(arguments: argparse.Namespace) -> int:
    """Print the reference table of all recipe keys.

    $ areal-hpc recipe-keys | grep rollout
    """
    from areal_hpc.recipe.reference import render_key_table

    print(render_key_table(), end="")
    return 0


@commands.add(
    "submit",
    RECIPE,
    OVERRIDES,
    SITE,
    FRESH,
    flag("--dry-run", "print all sbatch scripts and the cost; change nothing"),
    flag("--write-only", "set up everything but do not call sbatch"),
    flag("--wait", "show progress until the run ends; Ctrl-C detaches"),
    argument(
        "--after",
        "start after this job has succeeded (repeatable)",
        action="append",
        type=parse_slurm_job_id,
        default=[],
        metavar="JOBID",
    ),
)
def _submit_recipe(arguments: argparse.Namespace) -> int:
    """Submit a recipe to Slurm.

    The command sets up the run directory, submits all jobs, and returns. Jobs restart by
    themselves. Submit again to resume a run whose jobs have ended.

    $ areal-hpc submit my_recipe.yaml --site site.yaml --dry-run
    $ areal-hpc submit sft my_recipe.yaml    # its supervised fine-tuning alone
    $ for lr in 1e-6 3e-6; do
    $     areal-hpc submit my_recipe.yaml trainer.optimizer.lr=$lr trial_name=lr-$lr
    $ done
    """
    from areal_hpc.launch import slurm_launcher
    from areal_hpc.launch.run import report_finished_run, submit
    from areal_hpc.launch.slurm_launcher import format_dry_run
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.view.formatting import say

    recipe = load_recipe(*_get_recipe_arguments(arguments), arguments.site)
    paths = RunPaths(recipe.run_dir.resolve())
    if arguments.dry_run:
        requests = slurm_launcher.build_remaining_job_requests(recipe, Path.cwd(), arguments.after)
        print(format_dry_run(paths, requests), end="")
        return 0
    if arguments.write_only:
        if not arguments.fresh and report_finished_run(recipe, paths):
            return 0
        say(f"run      {paths.root}")
        for script in slurm_launcher.write_scripts(recipe, print_line=say, fresh=arguments.fresh):
            print(f"sbatch   {script}")
        return 0
    result = submit(recipe, wait=arguments.wait, after=arguments.after, fresh=arguments.fresh)
    return result.exit_code


@commands.add(
    "proxy",
    argument(
        "--upstream",
        "address of an SGLang server; may be repeated",
        action="append",
        required=True,
        metavar="URL",
    ),
    argument(
        "--tokenizer",
        "directory of the model, or of its tokenizer alone",
        type=Path,
        required=True,
        metavar="DIR",
    ),
    argument("--host", "address to listen on (default: loopback only)", default="127.0.0.1"),
    argument(
        "--port", "port to listen on; 0 takes a free one", type=int, required=True, metavar="PORT"
    ),
    argument(
        "--admin-key-file",
        "file with the admin key that opens sessions (created with mode 0600 if missing)",
        type=Path,
        required=True,
    ),
    argument("--tool-call-parser", "SGLang tool-call parser, for example qwen25", metavar="NAME"),
    argument("--reasoning-parser", "SGLang reasoning parser, for example qwen3", metavar="NAME"),
    argument(
        "--journal",
        "directory of the journal, so that sessions survive a restart",
        type=Path,
        metavar="DIR",
    ),
    argument("--context-length", "maximum prompt plus reply, in tokens", type=int),
    argument(
        "--serve-python",
        "Python environment with SGLang, for its parsers",
        default="auto",
        metavar="PATH",
    ),
    argument(
        "--drain-timeout-s",
        "seconds to wait for open calls at shutdown (%(default)s)",
        type=int,
        default=30,
    ),
    argument(
        "--set",
        "a limit, such as request_timeout_s=60 or max_sessions=100; may be repeated",
        action="append",
        default=[],
        metavar="KEY=VALUE",
    ),
)
def _run_standalone_proxy(arguments: argparse.Namespace) -> int:
    r"""Run the recording proxy without training.

    It stands in front of running SGLang servers. SIGTERM or Ctrl-C finishes open calls, then
    exits.

    $ areal-hpc proxy --upstream http://127.0.0.1:30000 --tokenizer MODEL_DIR \
    $     --port 8080 --admin-key-file my.key
    """
    from pydantic import ValidationError

    from areal_hpc.jobs.config import get_interpreter
    from areal_hpc.jobs.processes.process_setup import EscapingFormatter
    from areal_hpc.proxy.standalone import StandaloneProxyConfig, run
    from areal_hpc.recipe.base import explain_validation_errors

    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    options = vars(arguments)
    values = {name: options[name] for name in StandaloneProxyConfig.model_fields.keys() & options}
    values["upstreams"] = arguments.upstream
    values["serve_python"] = get_interpreter("serve", arguments.serve_python)
    values["proxy"] = dict(pair.partition("=")[::2] for pair in arguments.set)
    try:
        config = StandaloneProxyConfig.model_validate(values)
    except ValidationError as error:
        problems = explain_validation_errors(error.errors(), StandaloneProxyConfig)
        usage = "areal-hpc proxy --help"
        raise RecipeError.from_problems(
            problem if problem.key.startswith("proxy.") else replace(problem, hint=usage)
            for problem in problems
        ) from error
    run(config, partial(print, flush=True))
    return 0

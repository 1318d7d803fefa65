"""`areal-hpc eval`: evaluation sets on a model, or on a checkpoint of a run."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import SHARED_ARGUMENTS, UNHEALTHY_EXIT_CODE, CommandGroup
from areal_hpc.errors import RecipeError, RunInterruptedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_hpc.launch.evaluation.target import EvaluationTarget
    from areal_hpc.recipe.sections.evaluation import EvaluationSet
    from areal_hpc.view.evaluation_report import EvaluationReport


def add_commands(commands: CommandGroup) -> None:
    evaluate = commands.add_command(
        "eval",
        _evaluate,
        help="evaluate a model, or a checkpoint of a run, on evaluation sets",
        description="Play the tasks of evaluation sets on a model or a checkpoint, without a "
        "trainer, and print the numbers with their 95 % intervals. The same command again plays "
        "only tasks that have no result yet. Exits with 1 if --compare shows that a number got "
        "worse.",
        example="areal-hpc eval runs/quickstart/demo --step 20 --set valid\n"
        "areal-hpc eval runs/quickstart/demo --compare 0\n"
        "areal-hpc eval my_model --recipe my_recipe.yaml --set aime --submit --site site.yaml",
    )
    add = evaluate.add_argument
    add("place", type=Path, help="a run directory, or a model's (Hugging Face format)")
    add("overrides", **SHARED_ARGUMENTS["overrides"])
    add("--step", type=int, metavar="N", help="step of the checkpoint (the newest); 0: the start")
    help_ = "evaluation set (repeatable; default: all of the recipe)"
    add("--set", dest="sets", action="append", default=[], metavar="NAME", help=help_)
    add("--recipe", type=Path, metavar="FILE", help="the recipe by which a model is evaluated")
    help_ = "compare with a step of the run, or with a file of results, by a paired test"
    add("--compare", metavar="STEP|RESULTS", help=help_)
    add("--submit", action="store_true", help="submit it to Slurm, as one job")
    add("--wait", action="store_true", help="with --submit: until it ends; Ctrl-C detaches")
    add("--site", **SHARED_ARGUMENTS["--site"])


def _evaluate(arguments: argparse.Namespace) -> int:
    from areal_hpc.launch.evaluation.start import (
        build_evaluation_report,
        choose_sets,
        list_sets_without_full_result,
        raise_if_results_of_other_settings,
    )
    from areal_hpc.launch.evaluation.target import find_target
    from areal_hpc.launch.provenance import enter_launch_folder
    from areal_hpc.view.evaluation_report import format_report, write_evaluation_report

    if arguments.wait and not arguments.submit:
        raise RecipeError("--wait is for a job under Slurm", key="--wait", hint="add --submit")
    target = find_target(
        arguments.place,
        step=arguments.step,
        recipe=arguments.recipe,
        overrides=arguments.overrides,
        site=arguments.site,
    )
    sets = choose_sets(target.recipe, arguments.sets)
    raise_if_results_of_other_settings(target, sets)
    before = arguments.compare and _find_compared_report(arguments.compare, target, sets)
    if target.run is not None:
        enter_launch_folder(target.run)
    if list_sets_without_full_result(target, sets):
        print(f"evaluate {target.model}\n         in {target.paths.root}", flush=True)
        try:
            _run_or_submit_evaluation(arguments, target, sets)
        except RunInterruptedError:
            print("detached; the job goes on" if arguments.submit else "stopped")
            print("run the same command again for the rest, and for the results")
            return RunInterruptedError.exit_code
    if list_sets_without_full_result(target, sets):  # submitted, and nobody waits
        print("next     run the same command again for the results")
        return 0
    report = build_evaluation_report(target, sets)
    print("\n".join(format_report(report)))
    write_evaluation_report(target.paths, report)
    print(f"results  {target.paths.evaluation_report}")
    return _print_comparison_and_get_exit_code(before, report) if before else 0


def _run_or_submit_evaluation(
    arguments: argparse.Namespace, target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> None:
    from areal_hpc.launch.evaluation.start import run_evaluation, submit_evaluation
    from areal_hpc.launch.terminal import catch_stop_signals

    with catch_stop_signals() as stop:
        if arguments.submit:
            say = partial(print, flush=True)
            submit_evaluation(
                target, sets, print_line=say, wait_until=stop if arguments.wait else None
            )
        else:
            run_evaluation(target, sets, stop)


def _find_compared_report(
    compared_path: str, target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> EvaluationReport:
    from areal_hpc.launch.evaluation.start import find_report_of_step
    from areal_hpc.view.evaluation_report import read_report

    if compared_path.isdigit():
        return find_report_of_step(target, int(compared_path), sets)
    return read_report(Path(compared_path))


def _print_comparison_and_get_exit_code(before: EvaluationReport, report: EvaluationReport) -> int:
    from areal_hpc.view.evaluation_report import (
        compare_reports,
        format_comparison,
        list_uncompared_metrics,
    )

    compared = compare_reports(before, report)
    print("\n" + "\n".join(format_comparison(before.name, report.name, compared)))
    for line in list_uncompared_metrics(before, report, compared):
        print(line)
    is_worse = any(one.comparison.verdict == "worse" for one in compared)
    return UNHEALTHY_EXIT_CODE if is_worse else 0

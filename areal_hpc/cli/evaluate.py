"""`areal-hpc try`, `doctor` and `eval`: test an agent, a cluster, a recipe or a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import (
    OVERRIDES,
    RECIPE,
    SITE,
    UNHEALTHY_EXIT_CODE,
    CommandTable,
    argument,
    flag,
    parse_positive_int,
)
from areal_hpc.errors import RecipeError, RunInterruptedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_hpc.launch.evaluation import EvaluationTarget
    from areal_hpc.recipe.sections.cluster import SlurmConfig
    from areal_hpc.recipe.sections.evaluation import EvaluationSet
    from areal_hpc.view.evaluation_report import EvaluationReport

commands = CommandTable()


@commands.add(
    "try",
    RECIPE,
    OVERRIDES,
    argument("-n", "--tasks", "tasks to play (%(default)s)", type=parse_positive_int, default=3),
    argument("--base-url", "a running SGLang generates the replies", metavar="URL"),
)
def _run_trial_episodes(arguments: argparse.Namespace) -> int:
    """Let a recipe's agent play some tasks, without a model.

    It plays the first training tasks through the real proxy, and each conversation is printed
    with its reward and the rows it would become. Replies are random tokens unless --base-url
    names a server. Nothing is kept. Exits with 70 if the agent failed.

    $ areal-hpc try recipes/quickstart.yaml
    $ areal-hpc try my_recipe.yaml -n 5 rollout.workflow=my_package.MyAgent
    """
    from areal_hpc.launch.trial import run_trial
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.view.formatting import say

    try:
        return run_trial(
            load_recipe(arguments.recipe, arguments.overrides),
            tasks=arguments.tasks,
            print_line=say,
            base_url=arguments.base_url,
        )
    except KeyboardInterrupt:
        return RunInterruptedError.exit_code


@commands.add(
    "doctor",
    argument("recipe", "recipe whose files and settings are checked as well", type=Path, nargs="?"),
    OVERRIDES,
    SITE,
    flag("--check-node", "submit a one-minute job that checks whether the file root is shared"),
    flag("--gpu", "examine the GPUs of this machine"),
    argument(
        "--device",
        "with --gpu: cpu rehearses the same steps on a machine without GPUs",
        choices=("cuda", "cpu"),
        default="cuda",
    ),
    argument("--json", "write the results there as well, for an issue", type=Path),
)
def _run_doctor_checks(arguments: argparse.Namespace) -> int:
    """Check a cluster, and a recipe, before submitting.

    From the login node: Slurm commands, partitions and limits, shared storage, the Python of
    each role, and what the recipe refers to. With --gpu, on a GPU node, also driver, NCCL and
    links, and in a few minutes two steps of a tiny model. Exits with 1 if a check failed.

    $ areal-hpc doctor
    $ areal-hpc doctor my_recipe.yaml --site site.yaml --check-node
    $ areal-hpc doctor my_recipe.yaml --gpu --json doctor.json
    """
    from areal_hpc.launch.doctor import gpu
    from areal_hpc.launch.doctor.registry import run_checks, write_evidence
    from areal_hpc.launch.doctor.results import CheckStatus, DoctorSubject, format_checks
    from areal_hpc.recipe.loading import load_recipe
    from areal_hpc.recipe.sections.cluster import SlurmConfig
    from areal_hpc.view.formatting import say

    recipe, slurm, fileroot = None, SlurmConfig(), None
    if arguments.recipe is not None:
        recipe = load_recipe(arguments.recipe, arguments.overrides, arguments.site)
        slurm, fileroot = recipe.cluster.slurm, recipe.cluster.fileroot
    elif arguments.site is not None:
        slurm, fileroot = _read_site(arguments.site)
    if arguments.device == "cpu" and not arguments.gpu:
        raise RecipeError("--device belongs to --gpu", hint="add --gpu")
    results = run_checks(
        DoctorSubject(
            recipe,
            slurm,
            fileroot,
            has_site=arguments.site is not None,
            may_submit_storage_job=arguments.check_node,
            print_line=say,
        ),
        gpu.build_check_plan(recipe, slurm, arguments.device) if arguments.gpu else None,
    )
    print("\n".join(format_checks(results)))
    if arguments.json is not None:
        write_evidence(arguments.json, results)
    has_failed = any(result.verdict is CheckStatus.FAIL for result in results)
    return UNHEALTHY_EXIT_CODE if has_failed else 0


def _read_site(path: Path) -> tuple[SlurmConfig, Path | None]:
    from areal_hpc.recipe.loading import read_site_values
    from areal_hpc.recipe.sections.cluster import ClusterConfig

    values = read_site_values(path)
    cluster = ClusterConfig.model_validate({"fileroot": Path(), **values})
    return cluster.slurm, cluster.fileroot if "fileroot" in values else None


@commands.add(
    "eval",
    argument("place", "a run directory, or a model's (Hugging Face format)", type=Path),
    OVERRIDES,
    argument("--step", "step of the checkpoint (the newest); 0: the start", type=int),
    argument(
        "--set",
        "evaluation set (repeatable; default: all of the recipe)",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME",
    ),
    argument("--recipe", "the recipe by which a model is evaluated", type=Path),
    argument(
        "--compare",
        "compare with a step of the run, or with a file of results, by a paired test",
        metavar="STEP|RESULTS",
    ),
    flag("--submit", "submit it to Slurm, as one job"),
    flag("--wait", "with --submit: until it ends; Ctrl-C detaches"),
    SITE,
)
def _evaluate(arguments: argparse.Namespace) -> int:
    """Evaluate a model, or a checkpoint of a run, on evaluation sets.

    Numbers are printed with their 95 % intervals. The same command again plays only tasks that
    have no result yet. Exits with 1 if --compare shows that a number got worse.

    $ areal-hpc eval runs/quickstart/demo --step 20 --set valid
    $ areal-hpc eval runs/quickstart/demo --compare 0
    $ areal-hpc eval my_model --recipe my_recipe.yaml --set aime --submit --site site.yaml
    """
    from areal_hpc.launch.evaluation import (
        build_evaluation_report,
        check_recorded_settings,
        choose_sets,
        find_target,
        list_unfinished_sets,
    )
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
    check_recorded_settings(target, sets)
    compared = arguments.compare
    before = _find_compared_report(compared, target, sets) if compared else None
    if target.run is not None:
        enter_launch_folder(target.run)
    if list_unfinished_sets(target, sets):
        print(f"evaluate {target.model}\n         in {target.paths.root}", flush=True)
        try:
            _start_evaluation(arguments, target, sets, before)
        except RunInterruptedError:
            print("detached; the job goes on" if arguments.submit else "stopped")
            print("run the same command again for the rest, and for the results")
            return RunInterruptedError.exit_code
    if list_unfinished_sets(target, sets):  # submitted without --wait
        print("next     run the same command again for the results")
        return 0
    report = build_evaluation_report(target, sets)
    print("\n".join(format_report(report)))
    write_evaluation_report(target.paths, report)
    print(f"results  {target.paths.evaluation_report}")
    return _print_comparison(before, report) if before else 0


def _start_evaluation(
    arguments: argparse.Namespace,
    target: EvaluationTarget,
    sets: Sequence[EvaluationSet],
    before: EvaluationReport | None,
) -> None:
    from areal_hpc.jobs.processes.process_setup import catch_stop_signals
    from areal_hpc.launch.evaluation import run_evaluation, submit_evaluation
    from areal_hpc.view.formatting import say

    with catch_stop_signals() as stop:
        if arguments.submit:
            wait_until = stop if arguments.wait else None
            submit_evaluation(target, sets, print_line=say, wait_until=wait_until, before=before)
        else:
            run_evaluation(target, sets, stop, before)


def _find_compared_report(
    compared_path: str, target: EvaluationTarget, sets: Sequence[EvaluationSet]
) -> EvaluationReport:
    from areal_hpc.launch.evaluation import find_report_of_step
    from areal_hpc.view.evaluation_report import read_report

    if compared_path.isdigit():
        return find_report_of_step(target, int(compared_path), sets)
    return read_report(Path(compared_path))


def _print_comparison(before: EvaluationReport, report: EvaluationReport) -> int:
    from areal_hpc.view.evaluation_report import (
        compare_reports,
        format_comparison,
        list_uncompared_metrics,
    )

    compared = compare_reports(before, report)
    print("\n" + "\n".join(format_comparison(before.name, report.name, compared)))
    for line in list_uncompared_metrics(before, report, compared):
        print(line)
    is_worse = any(metric.comparison.verdict == "worse" for metric in compared)
    return UNHEALTHY_EXIT_CODE if is_worse else 0

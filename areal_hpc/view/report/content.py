"""Report on runs as one HTML file: no scripts, and nothing from elsewhere."""

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from areal_hpc import __version__
from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.evaluation.statistics import PairedComparison, compare_paired
from areal_hpc.evaluation.ticket_numbers import VALIDATION_SET_NAME
from areal_hpc.metrics.alerts import Alert
from areal_hpc.metrics.step_line import MetricRow, format_metric
from areal_hpc.recipe.loading import flatten_keys_hiding_private_values
from areal_hpc.recipe.private_values import hide_private_arguments
from areal_hpc.rundir.atomic import write_atomic_private
from areal_hpc.rundir.manifests import EvaluationResult, read_kept_evaluations_by_set
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.run_recipe import get_recipe_value
from areal_hpc.view.answers.answer import Answer
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.slow_run import explain_slow_run
from areal_hpc.view.audit.ticket_status import audit_run
from areal_hpc.view.compare import find_changed_keys, format_setting, label_differing_keys
from areal_hpc.view.metric_values import format_value, list_numbers, select_trained_rows
from areal_hpc.view.report.charts import N_SERIES_COLORS, Chart
from areal_hpc.view.report.curves import (
    build_step_time_chart,
    draw_run_curves,
    summarize_metric,
)
from areal_hpc.view.report.efficiency import Efficiency, measure_efficiency
from areal_hpc.view.report.examples import ShownEpisode, choose_example_episodes
from areal_hpc.view.state.alerts_at_newest_step import find_run_alerts
from areal_hpc.view.state.run_state import read_launches
from areal_hpc.view.state.summary import RunProgress, read_run_progress

SUMMARIZED_METRICS = (
    "staleness/mean",
    "staleness/max",
    "logprob/engine_trainer_mean_abs_diff",
    "logprob/engine_trainer_max_abs_diff",
    "entropy/mean",
    "reply/tokens_mean",
    "groups/zero_variance",
)
MIN_COMPARED_TASKS = 2
ResultsBySet = Mapping[str, Sequence[EvaluationResult]]
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=jinja2.StrictUndefined,
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Rewards of the same tasks twice, the second minus the first."""

    name: str
    before: float
    after: float
    comparison: PairedComparison


@dataclass(frozen=True, slots=True)
class RunReport:
    name: str
    path: str
    head: tuple[tuple[str, str], ...]
    """Facts of the first table, by name."""
    changed_keys: tuple[tuple[str, str, str], ...]
    """Key, default and value."""
    step_times: Chart | None
    metrics: tuple[tuple[str, str, str, str], ...]
    """Name, first, mean and last value."""
    efficiency: Efficiency
    audit: tuple[str, ...]
    alerts: tuple[Alert, ...]
    answers: tuple[Answer, ...]
    episodes: tuple[ShownEpisode, ...]
    launches: tuple[Mapping[str, str], ...]
    recipe: tuple[tuple[str, str], ...]
    episode_problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    made_at: str
    version: str
    runs: tuple[RunReport, ...]
    differing_keys: tuple[tuple[str, tuple[str, ...]], ...]
    """Key, and its value in each run."""
    curves: tuple[Chart, ...]
    evaluations: tuple[PairedDifference, ...]
    evaluation_problems: tuple[str, ...]


def write_report(runs: Sequence[RunPaths], out: Path) -> None:
    """Write a report to a new file, readable by its owner alone."""
    if out.exists():
        raise RecipeError(f"{out} exists", key="--out", hint="name another file, or remove it")
    write_atomic_private(out, render_report(build_report(runs)).encode(errors="replace"))


def render_report(report: Report) -> str:
    return _TEMPLATES.get_template("report.html.j2").render(report=report, colors=N_SERIES_COLORS)


def build_report(runs: Sequence[RunPaths]) -> Report:
    progress_by_run = [read_run_progress(paths) for paths in runs]
    names = [paths.run_name for paths in runs]
    names = [  # several may have one name
        name if names.count(name) == 1 else str(paths.root)
        for name, paths in zip(names, runs, strict=True)
    ]
    problems: list[str] = []
    evaluations = [
        (
            name,
            read_kept_evaluations_by_set(paths, VALIDATION_SET_NAME, problems),
            (one.recipe.get("valid_dataset"), get_recipe_value(one.recipe, "evaluation.sets")),
        )
        for name, paths, one in zip(names, runs, progress_by_run, strict=True)
    ]
    flat = [flatten_keys_hiding_private_values(one.recipe) for one in progress_by_run]
    # Evaluations of step 0 stand in a row that trained nothing.
    curves = {
        name: progress.snapshot.steps for name, progress in zip(names, progress_by_run, strict=True)
    }
    return Report(
        made_at=time.strftime("%Y-%m-%d %H:%M %Z"),
        version=__version__,
        runs=tuple(
            _describe_run(name, paths, progress)
            for name, paths, progress in zip(names, runs, progress_by_run, strict=True)
        ),
        differing_keys=tuple(
            (key, tuple(format_setting(one[key]) if key in one else "-" for one in flat))
            for key, _ in label_differing_keys([dict(one) for one in flat] if len(flat) > 1 else [])
        ),
        curves=tuple(draw_run_curves(curves)),
        evaluations=tuple(compare_evaluations(evaluations)),
        evaluation_problems=tuple(problems),
    )


def compare_evaluations(
    results_by_run: Sequence[tuple[str, ResultsBySet, object]],
) -> Iterator[PairedDifference]:
    """The first and the last evaluation of each set, and the last ones of runs with equal tasks.

    A run stands with what names its held-out tasks. Pure.
    """
    pairs: list[tuple[str, EvaluationResult, EvaluationResult]] = []
    for run, results_by_set, _ in results_by_run:
        for name, results in results_by_set.items():
            first, last = results[0], results[-1]
            title = f"{_name_set(run, name)}: step {first.step} to {last.step}"
            pairs.append((title, first, last))
    judged = [one for one in results_by_run if one[1]]
    for run, results_by_set, tasks in judged[1:]:
        other, its_results, its_tasks = judged[0]
        shared = [name for name in results_by_set if name in its_results]
        for name in shared if tasks == its_tasks else ():
            title = f"{_name_set(other, name)} to {run}, the last evaluation of each"
            pairs.append((title, its_results[name][-1], results_by_set[name][-1]))
    for title, before, after in pairs:
        n_tasks = len(after.rewards)
        if before is not after and len(before.rewards) == n_tasks >= MIN_COMPARED_TASKS:
            comparison = compare_paired(before.rewards, after.rewards)
            yield PairedDifference(title, before.mean_reward, after.mean_reward, comparison)


def _name_set(run_name: str, set_name: str) -> str:
    return run_name if set_name == VALIDATION_SET_NAME else f"{run_name}, {set_name}"


def _describe_run(run_name: str, paths: RunPaths, progress: RunProgress) -> RunReport:
    rows = select_trained_rows(progress.snapshot.steps)
    problems: list[str] = []
    recipe = progress.recipe
    return RunReport(
        name=run_name,
        path=str(paths.root),
        head=tuple(_list_head_facts(paths, progress, rows)),
        changed_keys=tuple(find_changed_keys(recipe)),
        step_times=build_step_time_chart(run_name, rows),
        metrics=tuple(_list_metric_rows(rows)),
        efficiency=measure_efficiency(paths, rows, progress.cell_count),
        audit=tuple(_describe_audit(paths)),
        alerts=tuple(find_run_alerts(paths)),
        answers=(explain_slow_run(paths), diagnose_collapse(paths)) if rows else (),
        episodes=tuple(choose_example_episodes(paths, progress.step, problems)),
        launches=tuple(_list_launches(paths)),
        recipe=tuple(
            (key, format_setting(value))
            for key, value in flatten_keys_hiding_private_values(recipe).items()
        ),
        episode_problems=tuple(problems),
    )


def _list_head_facts(
    paths: RunPaths, progress: RunProgress, rows: Sequence[MetricRow]
) -> Iterator[tuple[str, str]]:
    state = "finished" if paths.finished_marker.exists() else "not finished"
    yield "state", f"{state}, step {progress.step} of {progress.total_steps or '?'}"
    if rewards := list_numbers(rows, "reward/mean"):
        text = f"{format_metric(rewards[0], '.3f')} → {format_metric(rewards[-1], '.3f')}"
        yield "training reward", f"{text}, best {max(rewards):.3f}"
    if evaluations := progress.snapshot.evaluations:
        first, last = evaluations[0], evaluations[-1]
        best = max(evaluations, key=lambda one: one[1])
        yield (
            "held-out reward",
            f"{first[1]:.3f} → {last[1]:.3f} (step {first[0]} → {last[0]}), best {best[1]:.3f} "
            f"at step {best[0]}",
        )
    if progress.checkpoint_step is not None:
        yield "last checkpoint", f"step {progress.checkpoint_step}"


def _list_metric_rows(rows: Sequence[MetricRow]) -> Iterator[tuple[str, str, str, str]]:
    for name in SUMMARIZED_METRICS:
        if (values := summarize_metric(rows, name)) is not None:
            first, mean, last = (format_value(name, value) for value in values)
            yield name, first, mean, last


def _describe_audit(paths: RunPaths) -> Iterator[str]:
    try:
        audit = audit_run(paths)
    except (ArealError, OSError) as error:
        yield f"not audited: {error}"
        return
    yield audit.summary_line
    yield from (f"problem: {one}" for one in audit.problems[:5])
    if audit.untrained:
        count = len(audit.untrained)
        yield f"{count} parts of batches were not trained: areal-hpc audit lists them"


def _list_launches(paths: RunPaths) -> Iterator[Mapping[str, str]]:
    for one in read_launches(paths):
        environments = one.get("environments") or {}
        yield {
            "attempt": str(one.get("attempt")),
            "time": str(one.get("time")),
            "host": str(one.get("host")),
            "command": shlex.join(hide_private_arguments([*map(str, one.get("command") or ())])),
            "areal_hpc": f"{one.get('areal_hpc')} (commit {one.get('git_commit') or 'not known'})",
            "GPU driver": str(one.get("gpu_driver") or "none"),
            "code": str((one.get("user_code") or {}).get("digest") or "not recorded"),
        } | {
            f"{name} environment": _format_packages(environment)
            for name, environment in environments.items()
            if isinstance(environment, dict)
        }


def _format_packages(environment: Mapping[str, Any]) -> str:
    packages = environment.get("packages") or {}
    told = [f"Python {environment.get('python')}"]
    told += [f"{name} {version}" for name, version in packages.items()]
    return ", ".join(told)

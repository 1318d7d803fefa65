"""`areal-hpc why`, `view`, `report`, `trace` and `sync`: explain, show and export runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from areal_hpc.cli.arguments import (
    PLACE,
    RUN,
    UNHEALTHY_EXIT_CODE,
    CommandTable,
    argument,
    flag,
    parse_run_dir,
    parse_step_range,
)
from areal_hpc.errors import ClusterError, RecipeError, RunInterruptedError, escape_controls

FOLLOW_PERIOD_S = 30.0

commands = CommandTable()


@commands.add(
    "why",
    RUN,
    [
        flag("--slow", "what the steps' time goes to, and which cell, tool or episode is to blame"),
        argument("--step", "what differs at this step from the ten before it", type=int),
        flag("--collapse", "trends of entropy, lengths, repetition and distinct replies"),
        flag("--hacking", "evidence that the policy cheats its reward, and episodes to read"),
    ],
)
def _explain_run(arguments: argparse.Namespace) -> int:
    """Explain why a run failed or waits, is slow, or learns badly.

    The last failure is explained by Slurm states, exit codes, signals, memory, nodes, and the
    first traceback of all ranks. Other questions are answered from the run's files alone. Exits
    with 1 if you have to act.

    $ areal-hpc why runs/quickstart/demo
    $ areal-hpc why runs/quickstart/demo --slow
    $ areal-hpc why runs/quickstart/demo --step 30
    """
    has_question = arguments.slow or arguments.collapse or arguments.hacking
    if not has_question and arguments.step is None:
        return _explain_failure(arguments)
    from areal_hpc.view.answers.collapse import diagnose_collapse
    from areal_hpc.view.answers.reward_hacking import diagnose_reward_hacking
    from areal_hpc.view.answers.slow_run import explain_slow_run
    from areal_hpc.view.answers.step_change import explain_step_difference
    from areal_hpc.view.formatting import format_answer

    paths = parse_run_dir(arguments.run)
    if arguments.slow:
        answer = explain_slow_run(paths)
    elif arguments.collapse:
        answer = diagnose_collapse(paths)
    elif arguments.hacking:
        answer = diagnose_reward_hacking(paths)
    else:
        answer = explain_step_difference(paths, arguments.step)
    print("\n".join(format_answer(answer, shlex.quote(str(arguments.run)))))
    return 0 if answer.is_well else UNHEALTHY_EXIT_CODE


def _explain_failure(arguments: argparse.Namespace) -> int:
    from areal_hpc.view.diagnosis import diagnose, format_diagnosis
    from areal_hpc.view.state.run_view import RunView
    from areal_hpc.view.state.summary import describe_quarantined_batches

    paths = parse_run_dir(arguments.run)
    diagnosis = diagnose(RunView(paths))
    lines = format_diagnosis(diagnosis, shlex.quote(str(arguments.run)))
    lines += [f"quarantined: {batch}" for batch in describe_quarantined_batches(paths)]
    print("\n".join(lines))
    return 0 if diagnosis.is_well else UNHEALTHY_EXIT_CODE


@commands.add(
    "view",
    PLACE,
    argument("--port", "default: a free one, the same the next time", type=int, metavar="PORT"),
)
def _show_dashboard(arguments: argparse.Namespace) -> int:
    """Show runs in a browser: curves, conversations, tokens.

    Pages come from the files of a file root alone, for a browser on this machine or through the
    ssh tunnel that is printed. The address holds a secret. areal-hpc report writes the same
    pages into a file.

    $ areal-hpc view runs
    """
    from areal_hpc.view.dashboard.app import serve_dashboard
    from areal_hpc.view.formatting import say

    if not arguments.place.is_dir():
        raise RecipeError(
            f"there is no directory {arguments.place}", hint="give a file root or a run"
        )
    serve_dashboard(arguments.place.resolve(), arguments.port, say)
    return 0


@commands.add(
    "report",
    argument("runs", "run directories", type=Path, nargs="+", metavar="run"),
    argument(
        "--out",
        "a new file; default: the first run's name with -report.html or -bundle.tar.gz, here",
        type=Path,
    ),
    flag("--bundle", "one run's records with digests of all: audit --bundle checks them anywhere"),
)
def _write_report(arguments: argparse.Namespace) -> int:
    """Write one HTML file on a run, or on several beside one another.

    The pages of areal-hpc view, without a server or a network: curves, audit, answers,
    launches, held-out rewards task by task, up to 500 conversations. Values of the recipe that
    may be secrets are left out.

    $ areal-hpc report runs/quickstart/demo
    $ areal-hpc report runs/sweep/a runs/sweep/b --out sweep.html
    $ areal-hpc report runs/quickstart/demo --bundle
    """
    from areal_hpc.view.bundle import write_bundle
    from areal_hpc.view.dashboard.report import write_report
    from areal_hpc.view.transcripts.row_index import get_cache_dir

    runs = [parse_run_dir(path) for path in arguments.runs]
    if arguments.bundle:
        if len(runs) > 1:
            raise RecipeError(f"a bundle is of one run, got {len(runs)}", key="--bundle")
        out = arguments.out or Path(f"{runs[0].run_name.replace('/', '-')}-bundle.tar.gz")
        manifest, digest = write_bundle(runs[0], out, get_cache_dir())
        print(
            f"{out}: {len(manifest.files)} files, and digests of {len(manifest.left_out)} files of "
            f"the run\nSHA-256 of the bundle: {digest}"
        )
        return 0
    out = arguments.out or Path(f"{runs[0].run_name.replace('/', '-')}-report.html")
    count = write_report(list(dict.fromkeys(runs)), out, get_cache_dir())
    print(f"{out}: {count} conversations, {out.stat().st_size / 2**20:.1f} MiB")
    return 0


@commands.add(
    "trace",
    RUN,
    argument("--steps", "10..12 or 10:12, or one step", type=parse_step_range, required=True),
    argument("--out", "a new file; default: the run's name with -trace.json, here", type=Path),
)
def _write_trace(arguments: argparse.Namespace) -> int:
    """Write the timeline of some steps for Perfetto.

    The trace is in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open:
    phases of the trainer, model calls of each replica, episodes, events.

    $ areal-hpc trace runs/quickstart/demo --steps 10..12
    """
    from areal_hpc.view.timeline import write_trace

    run = parse_run_dir(arguments.run)
    out = arguments.out or Path(f"{run.run_name.replace('/', '-')}-trace.json")
    first, last = arguments.steps
    written = write_trace(run, first, last, out)
    print(
        f"{out}: {written.steps} steps, {written.episodes} episodes, {written.calls} model calls; "
        "open it with https://ui.perfetto.dev or chrome://tracing"
    )
    for problem in written.problems:
        print(f"not read: {problem}")
    return 0


@commands.add(
    "sync",
    RUN,
    argument(
        "--tracker",
        "wandb, or a program: docs/metrics.md",
        default="wandb",
        metavar="wandb|otlp|FILE.py",
    ),
    argument(
        "--python",
        "the Python that has the tracker's package (default: that of this command)",
        default=sys.executable,
        metavar="PATH",
    ),
    argument("--project", "project of the tracker", default="", metavar="NAME"),
    flag("--follow", "go on until the run is finished or cancelled"),
)
def _write_metrics_for_tracker(arguments: argparse.Namespace) -> int:
    """Write a run's metrics for a tracker: wandb, offline, or OpenTelemetry.

    Each call writes the final rows that are new: for wandb an offline run, all with one id; with
    otlp they go to OTEL_EXPORTER_OTLP_ENDPOINT, with the spans of their steps. No step is written
    twice, even after a kill. The run itself is only read.

    $ areal-hpc sync runs/quickstart/demo --python ~/wandb/bin/python
    $ areal-hpc sync runs/quickstart/demo --follow --project quickstart
    $ areal-hpc sync runs/quickstart/demo --tracker otlp --follow
    $ areal-hpc sync runs/quickstart/demo --tracker my_tracker.py
    """
    from areal_hpc.jobs.processes.process_setup import catch_stop_signals
    from areal_hpc.view.sync import choose_tracker, write_tracker_parts

    paths = parse_run_dir(arguments.run)
    tracker = choose_tracker(arguments.tracker, arguments.python, arguments.project)

    def sync() -> bool:
        is_last = paths.finished_marker.exists() or paths.cancelled_marker.exists()
        rows = write_tracker_parts(paths, tracker)
        if rows or not arguments.follow:
            print(f"{paths.tracker(tracker.name).root}: {rows} new rows", flush=True)
        return is_last

    if not arguments.follow:
        sync()
        return 0
    said = ""
    with catch_stop_signals() as stop:
        while True:
            try:
                if sync():
                    return 0
                said = ""
            except ClusterError as error:  # a collector may be away for a while
                if said != str(error):
                    said = str(error)
                    print(escape_controls(f"error: {said}"), file=sys.stderr, flush=True)
            if stop.wait(FOLLOW_PERIOD_S):
                return RunInterruptedError.exit_code

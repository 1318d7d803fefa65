"""`areal-hpc status`, `watch`, `logs`, `list`, `audit`, `shards`: inspect a run and its records."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from areal_hpc.cli.arguments import (
    PLACE,
    RUN,
    UNHEALTHY_EXIT_CODE,
    CommandTable,
    argument,
    flag,
    parse_positive_int,
    parse_run_dir,
)
from areal_hpc.errors import RecipeError, ShardError, escape_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.transcripts.row_filter import FIELD_NAMES_FOR_HELP

MAX_LISTED_FAULTS = 20
DEFAULT_SHOWN_ROWS = 5
ANSI_COLORS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
"""ANSI foreground colors that are readable on dark and on light."""

NAMES = argument(
    "names", "jobs (cell-0), processes (proxy), or both (cell-0/proxy)", nargs="*", default=[]
)
RUN_OR_SHARD = argument("run", "a run directory, or one shard file", type=Path)

commands = CommandTable()
commands.add_group("shards", "inspect recorded trajectories")


@commands.add("status", RUN)
def _show_status(arguments: argparse.Namespace) -> int:
    """Show progress and the jobs of a run.

    It queries Slurm once; `watch -n 30 areal-hpc status RUN` is safe to leave running. Exits
    with 1 if an alert is a failure.

    $ areal-hpc status runs/quickstart/demo
    """
    from areal_hpc.view.diagnosis import describe_reason
    from areal_hpc.view.formatting import get_program_command
    from areal_hpc.view.state.jobs import describe_allocation_steps, format_jobs
    from areal_hpc.view.state.run_view import RunView
    from areal_hpc.view.state.summary import (
        describe_activity,
        describe_evaluations,
        format_alert,
        format_run_progress,
        summarize_run,
    )

    view = RunView(parse_run_dir(arguments.run))
    lines = [f"{view.paths.run_name}: {view.state}", *describe_reason(view)]
    lines += format_run_progress(view)
    has_summary = view.step > 0 and (view.jobs.is_local or view.paths.finished_marker.exists())
    lines += [] if has_summary else describe_evaluations(view)
    lines += describe_activity(view)
    lines += [f"  {format_alert(alert)}" for alert in view.alerts]
    if not view.jobs.is_local:
        lines += ["", *format_jobs(view.jobs)]
    if steps := describe_allocation_steps(view.paths):
        lines += ["", *steps]
    if has_summary:
        lines += ["", summarize_run(view, get_program_command())]
    print("\n".join(lines))
    return UNHEALTHY_EXIT_CODE if view.failure_alerts else 0


@commands.add("watch", RUN)
def _watch_run(arguments: argparse.Namespace) -> int:
    """Show the progress of a run until it is over, then its status.

    It only reads, on the machine of the run or on a login node. Ctrl-C leaves the run at work.

    $ areal-hpc watch runs/quickstart/demo
    """
    from areal_hpc.jobs.processes.process_setup import catch_stop_signals
    from areal_hpc.view.state.live_progress import watch_run

    with catch_stop_signals() as stop:
        watch_run(parse_run_dir(arguments.run), stop)
    return 0 if stop.is_set() else _show_status(arguments)


@commands.add(
    "logs",
    RUN,
    NAMES,
    flag("-f", "--follow", "keep printing new lines"),
    argument("-n", "--lines", "lines to show (%(default)s)", type=int, default=40),
    flag("--all", "also the lines that SGLang writes for every batch and request"),
    argument("--attempt", "number of an earlier launch", type=int),
)
def _show_logs(arguments: argparse.Namespace) -> int:
    """Show the latest log lines of all processes, merged by time.

    They are those of the newest launch, unless --attempt names another.

    $ areal-hpc logs runs/quickstart/demo trainer -n 100
    $ areal-hpc logs runs/quickstart/demo cell-0/proxy --follow
    """
    from areal_hpc.view.logs import (
        POLL_S,
        LogFile,
        LogFollower,
        choose_attempt,
        drop_sglang_routine_lines,
        read_last_lines,
        require_log_files,
    )

    paths = parse_run_dir(arguments.run)
    if arguments.lines < 0:
        raise RecipeError(f"expected 0 lines or more, got {arguments.lines}", key="--lines")
    if arguments.follow and arguments.attempt:
        raise RecipeError(
            f"--follow needs the newest attempt; attempt {arguments.attempt} has ended",
            key="--follow",
            hint="leave out -f",
        )

    def show(lines: list[tuple[LogFile, str]]) -> None:
        for file, line in lines:
            print(_format_log_line(file.source, line), flush=arguments.follow)

    follower = LogFollower(paths, arguments.names) if arguments.follow else None
    if follower is None or follower.files:
        attempt = choose_attempt(paths, arguments.attempt)
        files = require_log_files(paths, attempt, arguments.names)
        show(read_last_lines(files, arguments.lines, keep_routine=arguments.all))
    try:
        while follower is not None:
            lines = follower.read_new_lines()
            show(lines if arguments.all else drop_sglang_routine_lines(lines))
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 0  # the way out of --follow
    return 0


@commands.add("stacks", RUN, NAMES)
def _show_stacks(arguments: argparse.Namespace) -> int:
    """Show what each thread of a running process does, such as of one that hangs.

    Each process, and SGLang, writes its stacks to its log, where they stay. Agents do not. Threads
    that wait for work come last.

    $ areal-hpc stacks runs/quickstart/demo trainer
    """
    from areal_hpc.view.stacks import fetch_stacks

    for file, lines in fetch_stacks(parse_run_dir(arguments.run), arguments.names):
        for line in lines:
            print(_format_log_line(file.source, line))
    return 0


def _format_log_line(process_name: str, line: str) -> str:
    line = escape_line(line)
    if not sys.stdout.isatty():
        return f"{process_name} | {line}"
    color = ANSI_COLORS[sum(process_name.encode()) % len(ANSI_COLORS)]
    return f"\x1b[{color}m{process_name}\x1b[0m | {line}"


@commands.add(
    "list",
    PLACE,
    flag("--all", "a column for each recipe key that differs, not only the first six"),
)
def _compare_runs(arguments: argparse.Namespace) -> int:
    """Compare runs: states, results, and recipe differences.

    $ areal-hpc list runs/quickstart
    """
    from areal_hpc.rundir.paths import list_runs
    from areal_hpc.slurm.queue import QueuePoller
    from areal_hpc.view.state.summary import compare_runs

    runs = list_runs(arguments.place)
    if not runs:
        raise RecipeError(
            f"there is no run in {arguments.place}",
            hint="give a file root, an experiment's directory or a run's",
        )
    print("\n".join(compare_runs(runs, QueuePoller(), shows_all_keys=arguments.all)))
    return 0


@commands.add(
    "audit",
    argument("run", "a run directory; with --bundle, a copy to compare", type=Path, nargs="?"),
    [
        flag("--tickets", "list the status of every ticket"),
        argument("--bundle", "check this file of areal-hpc report --bundle", type=Path),
    ],
)
def _audit_tickets(arguments: argparse.Namespace) -> int:
    """Check that every ticket was trained exactly once, or why not.

    The files of a run suffice, be it finished, stopped or running. Exits with 65 if a ticket
    was lost or trained twice.

    $ areal-hpc audit runs/quickstart/demo --tickets
    $ areal-hpc audit --bundle quickstart-demo-bundle.tar.gz
    """
    from areal_hpc.metrics.step_metrics import read_metrics
    from areal_hpc.view.audit import TicketStatus, audit_run

    if arguments.bundle:
        return _check_bundle(arguments.bundle, arguments.run and parse_run_dir(arguments.run))
    if arguments.run is None:
        raise RecipeError("expected a run directory", hint="name one, or a file with --bundle")
    paths = parse_run_dir(arguments.run)
    audit = audit_run(paths)
    faults = (TicketStatus.DUPLICATE, TicketStatus.LOST)
    faulty = [ticket for ticket in audit.tickets if ticket.status in faults]
    listed, max_lines = (audit.tickets, None) if arguments.tickets else (faulty, MAX_LISTED_FAULTS)
    lines = [f"ticket {row.ticket_id:>6}  {row.status:<11}  {row.why}" for row in listed]
    _print_first_lines(lines, max_lines)
    for problem in audit.problems:
        print(f"problem: {problem}")
    untrained = []
    for part in audit.untrained:
        tickets = "".join(f", ticket {ticket_id}" for ticket_id in part.tickets)
        quarantine_note = f" is quarantined ({part.quarantine})" if part.quarantine else ""
        untrained.append(f"untrained: batch {part.step}{tickets}{quarantine_note}: {part.reason}")
    _print_first_lines(untrained, max_lines)
    state = "finished" if audit.has_run_finished else "not finished"
    count = Counter(ticket.status for ticket in audit.tickets)
    print(
        f"{state}, last checkpoint at step {audit.checkpoint_step}, "
        f"{count[TicketStatus.DROPPED]} tickets dropped, "
        f"{count[TicketStatus.FILTERED]} filtered, {count[TicketStatus.UNSOUND]} unsound, "
        f"{count[TicketStatus.SKIPPED]} skipped, {count[TicketStatus.QUARANTINED]} quarantined"
    )
    if audit.non_training_episodes_by_kind:
        kinds = sorted(audit.non_training_episodes_by_kind.items())
        counts = " and ".join(f"{count} {kind}" for kind, count in kinds)
        print(f"kept beside the tickets, never trained on: {counts} episodes")
    if unrewarded := sum(row.get("reply/unrewarded") or 0 for row in read_metrics(paths.metrics)):
        print(f"{unrewarded} replies of trained episodes are not trained: no reward reaches them")
    print(audit.summary_line)
    return 0 if audit.is_consistent else ShardError.exit_code


def _check_bundle(bundle: Path, run: RunPaths | None) -> int:
    from areal_hpc.view.bundle import check_bundle

    check = check_bundle(bundle, run)
    problems = [*check.problems, *check.audit.problems]
    for problem in problems:
        print(f"problem: {escape_line(str(problem))}")
    manifest = check.manifest
    compared = f"{len(manifest.left_out)} in {run.root}" if run else "none outside of it"
    written = f"{manifest.run}, written by areal-hpc {manifest.areal_hpc} at {manifest.time}"
    print(
        f"{escape_line(written)}: compared {len(manifest.files)} files of the bundle and "
        f"{compared}\n{check.audit.summary_line}"
    )
    return ShardError.exit_code if problems or not check.audit.is_consistent else 0


def _print_first_lines(lines: Sequence[str], max_lines: int | None) -> None:
    for line in lines[:max_lines]:
        print(escape_line(line))
    if max_lines is not None and len(lines) > max_lines:
        print(f"... and {len(lines) - max_lines} more: --tickets lists all")


@commands.add("shards ls", RUN, flag("--json", "one JSON object per shard"))
def _list_shards(arguments: argparse.Namespace) -> int:
    """List sealed shards, one line each.

    Columns: kinds of rows, tokens, tickets, weight versions, mean reward.

    $ areal-hpc shards ls runs/quickstart/demo
    """
    from areal_hpc.view.shard_report import format_shard_table, format_shards_jsonl

    write = format_shards_jsonl if arguments.json else format_shard_table
    print(write(parse_run_dir(arguments.run)))
    return 0


@commands.add(
    "shards show",
    RUN_OR_SHARD,
    [
        argument("row", "row, counted over the run's shards (or in the file)", type=int, nargs="?"),
        argument("--ticket", "every row of this ticket", type=int),
    ],
    argument(
        "--where",
        "rows that match an expression of these fields: "
        f"{', '.join(FIELD_NAMES_FOR_HELP)}; ~ matches a part of a text",
        default="",
        metavar="EXPRESSION",
    ),
    argument("--sort", "largest first; else as recorded", default="", metavar="FIELD"),
    argument(
        "-n",
        "--rows",
        "print at most so many rows, the last ones unless sorted; default 5, all of a ticket",
        type=parse_positive_int,
    ),
    flag("--tokens", "one line per token"),
)
def _show_rows(arguments: argparse.Namespace) -> int:
    """Show conversations as text, episodes of one ticket side by side.

    Held-out and failed episodes are there as well: --where kind=failed.

    $ areal-hpc shards show runs/quickstart/demo 0
    $ areal-hpc shards show runs/quickstart/demo --where "step=20 and reward<0.5" --sort length
    """
    from areal_hpc.view.shard_report import find_tokenizer_file, format_tokens
    from areal_hpc.view.transcripts.row_search import RowQuery, find_rows, format_groups

    path, paths = _parse_run_or_shard(arguments.run)
    max_rows = arguments.rows or (DEFAULT_SHOWN_ROWS if arguments.ticket is None else None)
    query = RowQuery(arguments.where, arguments.ticket, arguments.row, arguments.sort, max_rows)
    rows, matching = find_rows(path, query)
    if arguments.tokens:
        tokenizer = find_tokenizer_file(paths)
        print("\n\n".join(format_tokens(row, tokenizer) for row in rows))
    elif rows:
        print(format_groups(rows, shutil.get_terminal_size((100, 24)).columns))
    if len(rows) < matching or not rows:
        print(f"\n{len(rows)} of {matching} rows that match" if rows else "no row matches")
    return 0


@commands.add(
    "shards export",
    RUN_OR_SHARD,
    argument(
        "--format", "format of the file", choices=("jsonl", "parquet", "sft", "atif"), required=True
    ),
    argument("--out", "the file; it must not exist", type=Path, required=True),
    argument(
        "--where",
        "only rows that match an expression, as for areal-hpc shards show",
        default="",
        metavar="EXPRESSION",
    ),
)
def _export_rows(arguments: argparse.Namespace) -> int:
    r"""Write recorded rows to a file for other programs.

    All that is recorded, as JSON lines or Parquet (versions are packed as
    docs/shard-format-v2.md says); conversations for supervised fine-tuning; or trajectories in
    ATIF 1.8, one a line.

    $ areal-hpc shards export runs/quickstart/demo --format parquet --out rows.parquet
    $ areal-hpc shards export runs/quickstart/demo --format sft --out good.jsonl \
    $     --where "kind=train and reward>=1"
    """
    from areal_hpc.view.transcripts.export import export_rows
    from areal_hpc.view.transcripts.row_search import RowQuery, find_rows

    path, paths = _parse_run_or_shard(arguments.run)
    rows, _ = find_rows(path, RowQuery(arguments.where))
    with _open_progress_bar("writing") as show:
        report = export_rows(
            rows, arguments.format, arguments.out, paths, lambda done: show(done, len(rows))
        )
    left_out = f"; {report.left_out} without messages left out" if report.left_out else ""
    print(f"{arguments.out}: {report.written} rows{left_out}")
    return 0


@commands.add("shards verify", RUN)
def _verify_shards(arguments: argparse.Namespace) -> int:
    """Verify all digests; list damaged files.

    Exits with 65 if one is damaged.

    $ areal-hpc shards verify runs/quickstart/demo
    """
    from areal_hpc.shards.verify import verify_run
    from areal_hpc.view.shard_report import format_verification

    with _open_progress_bar("verifying") as show:
        report = verify_run(parse_run_dir(arguments.run), show)
    print(format_verification(report))
    return ShardError.exit_code if report.problems else 0


def _parse_run_or_shard(path: Path) -> tuple[Path, RunPaths]:
    """Return the resolved path, and the run that it is or lies in."""
    path = path.resolve()
    return path, RunPaths(path.parent.parent) if path.is_file() else parse_run_dir(path)


@contextmanager
def _open_progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error; the yielded function takes what is done and the total."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

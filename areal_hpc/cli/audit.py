"""`areal-hpc audit`: what became of every ticket of a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_hpc.cli.arguments import Commands, existing_run

if TYPE_CHECKING:
    from areal_hpc.rundir.checkpoints import UntrainedRecord

MOST_NAMED = 20
"""Tickets at fault, and parts of batches that were not trained on, listed without being asked."""


def add_commands(commands: Commands) -> None:
    """Add this family to the command line."""
    audit = commands.add_parser(
        "audit",
        help="account for every ticket: trained once, dropped, filtered, open, lost or duplicate",
        description="Account for every ticket of a run from its directory alone, whether it is "
        "finished, stopped or at work. Exits with 65 if a ticket was lost or trained twice.",
    )
    audit.add_argument("run", type=Path, help="a run directory")
    audit.add_argument("--tickets", action="store_true", help="list every ticket's fate")
    audit.set_defaults(command=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    from areal_hpc.audit.fates import Fate, audit_run
    from areal_hpc.errors import ShardError

    audit = audit_run(existing_run(arguments.run))
    faulty = [one for one in audit.tickets if one.fate in (Fate.DUPLICATE, Fate.LOST)]
    listed, most = (audit.tickets, None) if arguments.tickets else (faulty, MOST_NAMED)
    _show([f"ticket {one.ticket_id:>6}  {one.fate:<9}  {one.why}" for one in listed], most)
    for problem in audit.problems:
        print(f"problem: {problem}")
    _show([_describe(part) for part in audit.untrained], most)
    state = "finished" if audit.is_finished else "not finished"
    dropped, filtered = len(audit.of(Fate.DROPPED)), len(audit.of(Fate.FILTERED))
    unsound, skipped = len(audit.of(Fate.UNSOUND)), len(audit.of(Fate.SKIPPED))
    print(
        f"{state}, committed up to step {audit.committed_step}, {dropped} tickets dropped, "
        f"{filtered} filtered, {unsound} unsound, {skipped} skipped"
    )
    print(audit.verdict)
    return 0 if audit.is_clean else ShardError.exit_code


def _describe(part: UntrainedRecord) -> str:
    tickets = "".join(f", ticket {ticket_id}" for ticket_id in part.tickets)
    return f"untrained: batch {part.step}{tickets}: {part.reason}"


def _show(lines: Sequence[str], most: int | None) -> None:
    for line in lines[:most]:
        print(line)
    if most is not None and len(lines) > most:
        print(f"... and {len(lines) - most} more: --tickets lists all")

"""`areal-hpc audit`: what became of every ticket of a run."""

from __future__ import annotations

import argparse
from pathlib import Path

from areal_hpc.cli.arguments import Commands, existing_run

MOST_NAMED = 20
"""Tickets at fault that are listed without being asked for."""


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
    listed = audit.tickets if arguments.tickets else faulty[:MOST_NAMED]
    for one in listed:
        print(f"ticket {one.ticket_id:>6}  {one.fate:<9}  {one.why}")
    if len(faulty) > MOST_NAMED and not arguments.tickets:
        print(f"... and {len(faulty) - MOST_NAMED} more: --tickets lists all")
    for problem in audit.problems:
        print(f"problem: {problem}")
    state = "finished" if audit.is_finished else "not finished"
    dropped, filtered = len(audit.of(Fate.DROPPED)), len(audit.of(Fate.FILTERED))
    print(
        f"{state}, committed up to step {audit.committed_step}, {dropped} tickets dropped, "
        f"{filtered} filtered"
    )
    print(audit.verdict)
    return 0 if audit.is_clean else ShardError.exit_code

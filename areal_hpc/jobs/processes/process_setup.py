"""Set-up of a process of a job as it starts: its log and its limit of open files.

Light to import: every process pays for it.
"""

import logging
import resource
import sys

from areal_hpc.errors import escape_controls

PROMETHEUS_VARIABLE = "AREAL_HPC_PROMETHEUS"
"""Set to 1 in the processes of a run with `cluster.prometheus`."""


def raise_open_file_limit() -> None:
    """Raise this process's limit to what its administrator allows.

    Logins and Slurm often give 1,024, kept low for programs that use select(2). The ledger holds
    two connections for each cell, a proxy one for each call that its agents have under way.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class EscapingFormatter(logging.Formatter):
    """Formatter of records that may quote a model: whoever prints a log obeys no such text."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def set_up_logging(level: int = logging.INFO) -> None:
    """One line per record on standard error, which the supervisor redirects to the role's log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)

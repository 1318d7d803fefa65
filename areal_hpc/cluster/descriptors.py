"""How many files and connections a process may have open."""

from __future__ import annotations

import resource


def allow_all_descriptors() -> None:
    """Raise this process's limit to what its administrator allows.

    Logins and Slurm often give 1,024, kept low for programs that use select(2). The ledger holds
    two connections for each cell, a proxy one for each call that its agents have under way.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

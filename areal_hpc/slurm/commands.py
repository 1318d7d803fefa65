"""Slurm command-line calls with timeouts and typed errors."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime

from areal_hpc.errors import SlurmCommandError, SlurmNotFoundError, SlurmTimeoutError

ANSWER_TIMEOUT_S = 15.0
"""Longest wait for a command; Slurm's commands wait for 10 s (MessageTimeout) and try twice."""
_NO_ANSWER_MESSAGES = (
    "socket timed out",
    "unable to contact",
    "connection refused",
    "connection reset",
    "communication connection failure",
    "zero bytes were transmitted",
    "no route to host",
    "unable to connect to database",
    "problem talking to the database",
    "slurm backup controller in standby",
    "unexpected message received",
    "resource temporarily unavailable",
)
"""Messages of commands for errors of the daemon, not of the call."""

_FILTER_PREFIXES = ("SQUEUE_", "SCANCEL_", "SACCT_", "SINFO_")
"""Prefixes of variables by which users filter output: a hidden job would count as gone."""


def has_slurm() -> bool:
    return shutil.which("squeue") is not None


def run_slurm_command(
    *command: str,
    timeout_s: float = ANSWER_TIMEOUT_S,
    environ: Mapping[str, str] = os.environ,
) -> str:
    """Run one of Slurm's commands and return its output.

    Raises:
        SlurmTimeoutError: The daemon did not answer, this node could not start the command now, or
            a signal ended it.
        SlurmCommandError: The command failed.
        SlurmNotFoundError: There is no such command on this machine.
    """
    kept = {key: value for key, value in environ.items() if not key.startswith(_FILTER_PREFIXES)}
    try:
        answer = subprocess.run(
            command,
            env={**kept, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SlurmNotFoundError(
            f"there is no {command[0]} on this machine",
            hint="log in to a node of the cluster that has Slurm's commands",
        ) from error
    except OSError as error:  # no process or memory left, or a stale handle: a retry may succeed
        raise SlurmTimeoutError(
            f"{command[0]} could not be started: {error.strerror}", hint="scontrol ping"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeoutError(
            f"{command[0]} did not respond within {timeout_s:.0f} s", hint="scontrol ping"
        ) from error
    if answer.returncode == 0:
        return answer.stdout
    if answer.returncode < 0:  # Slurm ends it with all processes of a job
        raise SlurmTimeoutError(
            f"{command[0]} was ended by signal {-answer.returncode}", hint="scontrol ping"
        )
    message = answer.stderr.strip() or answer.stdout.strip() or "no output"
    is_outage = any(silence in message.lower() for silence in _NO_ANSWER_MESSAGES)
    kind = SlurmTimeoutError if is_outage else SlurmCommandError
    raise kind(f"{command[0]}: {message}", hint="scontrol ping")


def parse_slurm_timestamp(text: str) -> float | None:
    """Convert a local time that Slurm printed to Unix time; None for `N/A`, `Unknown`, `None`."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def build_comma_lists(items: Sequence[str], size: int = 500) -> list[str]:
    return [",".join(items[start : start + size]) for start in range(0, len(items), size)]

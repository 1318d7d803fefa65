"""Environment of a job's processes: variables, interpreter, log folder, file limit."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.jobs.topology import (
    interface_of,
    reachable_host,
    restart_count,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    LaunchFile,
)
from areal_hpc.rundir.paths import ROLES, format_restart_dir
from areal_hpc.slurm.container import image_python


def allow_all_descriptors() -> None:
    """Raise this process's limit to what its administrator allows.

    Logins and Slurm often give 1,024, kept low for programs that use select(2). The ledger holds
    two connections for each cell, a proxy one for each call that its agents have under way.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def interpreter_of(role: str, configured: str) -> str:
    """The Python that runs a role's processes.

    Args:
        role: `serve`, `train` or `agents`.
        configured: A path, or `auto`: the checkout's own environment of that role if it exists,
            else the interpreter that runs now.
    """
    if configured != "auto":
        return configured
    checkout = Path(__file__).resolve().parents[2]
    candidate = checkout / ".venvs" / role / "bin" / "python"
    return str(candidate) if candidate.exists() else sys.executable


def log_dir(launch: LaunchFile, environ: Mapping[str, str]) -> Path:
    """Where this start of the job logs: under Slurm each restart has a folder of its own."""
    folder = Path(launch.log_dir) / launch.job.name
    if launch.slurm is None:
        return folder
    return folder / format_restart_dir(restart_count(environ))


def log_headline(environ: Mapping[str, str]) -> str:
    """The first line of every log under Slurm."""
    job_id, restart = environ["SLURM_JOB_ID"], restart_count(environ)
    return f"node {environ['SLURMD_NODENAME']} job {job_id} restart {restart}"


def surroundings(launch: LaunchFile, environ: Mapping[str, str]) -> dict[str, str]:
    """What processes must know of the node under Slurm: their address, and gloo's interface.

    gloo listens where the host's name leads, which may be nowhere.

    Raises:
        RecipeError: The interface that the site names does not exist here.
    """
    if launch.slurm is None:
        return {}
    host = reachable_host(launch.slurm.interface, environ)
    interface = interface_of(host)
    gloo = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return {**gloo, "AREAL_HPC_HOST": host}


def set_up_logging(level: int = logging.INFO) -> None:
    """One line per record on standard error, which the supervisor redirects to the role's log."""
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def pythons_of(recipe: Recipe) -> dict[str, str]:
    """The interpreter of each role: the recipe's, else this checkout's or the images'."""
    cluster = recipe.cluster
    named = {role: str(getattr(cluster, role).python) for role in ROLES}
    if cluster.slurm.container.kind == "none":
        return {role: interpreter_of(role, python) for role, python in named.items()}
    return {
        role: image_python(role) if python == "auto" else python for role, python in named.items()
    }

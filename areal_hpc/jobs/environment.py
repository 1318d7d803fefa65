"""Environment of a job's processes: variables, interpreter, log folder, file limit."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from areal_hpc.jobs.topology import find_interface, find_reachable_host, get_slurm_restart_count
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import (
    LaunchFile,
)
from areal_hpc.rundir.paths import ROLES, format_restart_dir
from areal_hpc.slurm.container import get_image_python


def raise_file_limit() -> None:
    """Raise this process's limit to what its administrator allows.

    Logins and Slurm often give 1,024, kept low for programs that use select(2). The ledger holds
    two connections for each cell, a proxy one for each call that its agents have under way.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def get_interpreter(role: str, configured: str) -> str:
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


def get_log_dir(launch: LaunchFile, environ: Mapping[str, str]) -> Path:
    """Where this start of the job logs: under Slurm each restart has a folder of its own."""
    folder = Path(launch.log_dir) / launch.job.name
    if launch.slurm is None:
        return folder
    return folder / format_restart_dir(get_slurm_restart_count(environ))


def format_log_header(environ: Mapping[str, str]) -> str:
    """The first line of every log under Slurm."""
    job_id, restart = environ["SLURM_JOB_ID"], get_slurm_restart_count(environ)
    return f"node {environ['SLURMD_NODENAME']} job {job_id} restart {restart}"


def build_task_environment(launch: LaunchFile, environ: Mapping[str, str]) -> dict[str, str]:
    """What processes must know of the node under Slurm: their address, and gloo's interface.

    gloo listens where the host's name leads, which may be nowhere.

    Raises:
        RecipeError: The interface that the site names does not exist here.
    """
    if launch.slurm is None:
        return {}
    host = find_reachable_host(launch.slurm.interface, environ)
    interface = find_interface(host)
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


def get_interpreters(recipe: Recipe) -> dict[str, str]:
    """The interpreter of each role: the recipe's, else this checkout's or the images'."""
    cluster = recipe.cluster
    named = {role: str(getattr(cluster, role).python) for role in ROLES}
    if cluster.slurm.container.kind == "none":
        return {role: get_interpreter(role, python) for role, python in named.items()}
    return {
        role: get_image_python(role) if python == "auto" else python
        for role, python in named.items()
    }

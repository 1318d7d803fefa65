"""State directory: ownership, lock, stored plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.slurm.devcluster.paths import DevclusterPaths
from areal_hpc.slurm.devcluster.plan import DevclusterPlan, parse_plan, plan_devcluster
from areal_hpc.slurm.devcluster.processes import lock_folder


def open_state(paths: DevclusterPaths) -> None:
    """Make the state directory, or see that it may be used.

    Raises:
        RecipeError: It holds something else, or belongs to someone else.
    """
    paths.root.mkdir(mode=0o755, parents=True, exist_ok=True)
    if paths.root.is_symlink() or paths.root.stat().st_uid != os.geteuid():
        raise RecipeError(
            f"expected a directory of your own, got {paths.root}",
            key="--state-dir",
            hint="name another one",
        )
    if not paths.made_of.exists() and any(paths.root.iterdir()):
        raise RecipeError(
            f"{paths.root} is neither empty nor a devcluster",
            key="--state-dir",
            hint="empty it or name another one: `down` removes all of it",
        )


@contextmanager
def lock_state(paths: DevclusterPaths) -> Iterator[None]:
    """Be the only command that changes this cluster.

    Raises:
        ClusterError: Another one did, and removed the directory.
    """
    with lock_folder(paths.root):
        if not paths.root.exists():
            raise ClusterError(f"another command removed {paths.root}", hint="repeat the command")
        yield


def read_plan(paths: DevclusterPaths) -> DevclusterPlan:
    """The plan of the cluster that exists.

    Raises:
        RecipeError: There is none.
    """
    if not paths.made_of.exists():
        raise RecipeError(f"there is no devcluster in {paths.root}", hint="areal-hpc devcluster up")
    return plan_devcluster(*parse_plan(paths.made_of.read_text()), paths)

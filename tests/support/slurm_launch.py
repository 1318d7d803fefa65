"""What jobs of a run know of Slurm, as a launcher would have written it."""

from typing import Any

from areal_hpc.rundir.jobs import SlurmLaunchInfo
from areal_hpc.rundir.paths import RunPaths


def build_slurm_launch_info(paths: RunPaths, job: str, **options: Any) -> SlurmLaunchInfo:
    """That of a run's job; `options` are its other fields, or others in the place of these."""
    known = {
        "submissions": str(paths.submissions),
        "script": str(paths.job(job).script),
        "excluded_nodes": str(paths.excluded_nodes),
        "job_name": job,
        "comment": str(paths.root),
        "cancelled": str(paths.cancelled_marker),
    }
    return SlurmLaunchInfo(**(known | options))

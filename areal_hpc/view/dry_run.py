"""Dry run of a submission: scripts and maximum cost."""

from collections.abc import Sequence

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.script import JobRequest
from areal_hpc.slurm.submit import render_script


def format_dry_run(
    paths: RunPaths, requests: Sequence[JobRequest], members: int | None = None
) -> str:
    """Every job's script, the files that would be written, and the most that all can cost.

    `members` counts the runs of a sweep, of which each job is an array.
    """
    parts = []
    for request in requests:
        where = paths.job(request.job).script
        parts.append(f"==> {where} ({request.shape}) <==\n{render_script(request, members)}")
    return "\n".join(
        [*parts, _describe_written_files(paths), _describe_cost(requests, members or 1)]
    )


def _describe_written_files(paths: RunPaths) -> str:
    places = (
        (paths.recipe, "the resolved recipe"),
        (paths.provenance, "versions and this command line"),
        (paths.data_dir, "task sets, and the model if it is made for the run"),
        (paths.submissions, "the number of every job"),
        (paths.jobs_dir, "a folder a job: the script above, launch.json, submitit's files"),
        (paths.logs_dir, "a folder an attempt"),
    )
    lines = [f"  {place}  {what}" for place, what in places]
    return "\n".join(["==> files that would be written <==", *lines, ""])


def _describe_cost(requests: Sequence[JobRequest], runs: int) -> str:
    nodes = runs * sum(request.shape.nodes for request in requests)
    gpus = runs * sum(request.shape.nodes * request.shape.gpus_per_node for request in requests)
    gpu_hours = runs * sum(request.shape.gpu_hours for request in requests)
    node_hours = runs * sum(request.shape.node_hours for request in requests)
    return (
        f"==> maximum cost, if all jobs run to their time limit <==\n"
        f"  {runs * len(requests)} jobs, {nodes} nodes, {gpus} GPUs: "
        f"{gpu_hours:.1f} GPU-hours, {node_hours:.1f} node-hours\n"
        f"  jobs end with the run; a requeue after a time limit may cost as much again\n"
    )

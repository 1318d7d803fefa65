"""Dry run of a submission: scripts and maximum cost."""

from collections.abc import Sequence

from areal_hpc.rundir.jobs import CARETAKER_JOB
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.batch_script.script import JobRequest
from areal_hpc.slurm.submit import render_script


def format_dry_run(paths: RunPaths, requests: Sequence[JobRequest]) -> str:
    """Every job's script, the files that would be written, and the most that all can cost."""
    parts = []
    for request in requests:
        where = paths.job(request.job).script
        parts.append(f"==> {where} ({request.shape}) <==\n{render_script(request)}")
    return "\n".join([*parts, _describe_written_files(paths), _describe_max_cost(requests)])


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


def _describe_max_cost(requests: Sequence[JobRequest]) -> str:
    shapes = [request.shape for request in requests if request.job != CARETAKER_JOB]
    nodes = sum(shape.nodes for shape in shapes)
    gpus = sum(shape.nodes * shape.gpus_per_node for shape in shapes)
    gpu_hours = sum(shape.gpu_hours for shape in shapes)
    node_hours = sum(shape.node_hours for shape in shapes)
    return (
        f"==> maximum cost, if all jobs run to their time limit <==\n"
        f"  {len(shapes)} jobs, {nodes} nodes, {gpus} GPUs: "
        f"{gpu_hours:.1f} GPU-hours, {node_hours:.1f} node-hours\n"
        f"  jobs end with the run; a requeue after a time limit may cost as much again\n"
    )

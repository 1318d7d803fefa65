"""What a submission would ask of the cluster, for people: every script, and the cost."""

from __future__ import annotations

from collections.abc import Sequence

from areal_hpc.cluster.sbatch import JobRequest
from areal_hpc.cluster.submit import script_of
from areal_hpc.layout import RunLayout


def describe_requests(layout: RunLayout, requests: Sequence[JobRequest]) -> str:
    """Every job's script to the letter, what would be written, and the most it can cost."""
    parts = []
    for request in requests:
        where = layout.jobs_dir / request.job / "job.sbatch"
        parts.append(f"==> {where} ({request.shape}) <==\n{script_of(request)}")
    return "\n".join([*parts, _written(layout), _cost(requests)])


def _written(layout: RunLayout) -> str:
    places = (
        (layout.recipe, "the resolved recipe"),
        (layout.provenance, "versions and this command line"),
        (layout.data_dir, "task sets, and the model if it is made for the run"),
        (layout.submissions, "the number of every job"),
        (layout.jobs_dir, "a folder a job: the script above, launch.json, submitit's files"),
        (layout.logs_dir, "a folder an attempt"),
    )
    lines = [f"  {place}  {what}" for place, what in places]
    return "\n".join(["==> would be written <==", *lines, ""])


def _cost(requests: Sequence[JobRequest]) -> str:
    nodes = sum(request.shape.nodes for request in requests)
    gpus = sum(request.shape.nodes * request.shape.gpus_per_node for request in requests)
    gpu_hours = sum(request.shape.gpu_hours for request in requests)
    node_hours = sum(request.shape.node_hours for request in requests)
    return (
        f"==> at most, until the time limits <==\n"
        f"  {len(requests)} jobs, {nodes} nodes, {gpus} GPUs: "
        f"{gpu_hours:.1f} GPU-hours, {node_hours:.1f} node-hours\n"
        f"  jobs end with the run; a requeue after a time limit may cost as much again\n"
    )

"""Dry run of a submission: scripts and maximum cost."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.batch_script.script import JobRequest
from areal_hpc.slurm.batch_script.successors import (
    build_job_id_placeholders,
    build_options_to_start_after_failure,
)
from areal_hpc.slurm.submit import render_script


def format_dry_run(paths: RunPaths, requests: Sequence[JobRequest]) -> str:
    """Every job's script, the files that would be written, and the most that all can cost."""
    parts = []
    for request in requests:
        where = paths.job(request.job).script
        parts.append(f"==> {where} ({request.shape}) <==\n{render_script(request)}")
        parts += _describe_successors(request, where)
    return "\n".join([*parts, _describe_written_files(paths), _describe_max_cost(requests)])


def _describe_successors(request: JobRequest, script: Path) -> list[str]:
    ids = build_job_id_placeholders(request.job, request.successors)
    commands = [
        shlex.join(
            [
                "sbatch",
                *build_options_to_start_after_failure(ids[:place], request.dependency),
                str(script),
            ]
        )
        for place in range(1, len(ids))
    ]
    return ["\n".join([f"==> successors of {request.job} <==", *commands, ""])] if commands else []


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
    nodes = sum(request.shape.nodes for request in requests)
    gpus = sum(request.shape.nodes * request.shape.gpus_per_node for request in requests)
    starts = [(request.shape, 1 + request.successors) for request in requests]
    gpu_hours = sum(shape.gpu_hours * number for shape, number in starts)
    node_hours = sum(shape.node_hours * number for shape, number in starts)
    jobs = sum(number for _, number in starts)
    return (
        f"==> maximum cost, if all jobs run to their time limit <==\n"
        f"  {jobs} jobs, {nodes} nodes, {gpus} GPUs: "
        f"{gpu_hours:.1f} GPU-hours, {node_hours:.1f} node-hours\n"
        f"  jobs end with the run; a requeue after a time limit may cost as much again\n"
    )

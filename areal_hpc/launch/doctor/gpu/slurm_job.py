"""Examination of nodes by a Slurm job of doctor's own: its script, its submission, its answer."""

import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from areal_hpc.errors import ClusterError, RecipeError
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, GpuReport, Unmeasured
from areal_hpc.recipe.sections.cluster import JobOptions, format_flags
from areal_hpc.rundir.jsonl import read_tail_lines
from areal_hpc.rundir.paths import JobPaths
from areal_hpc.slurm.commands import run_slurm_command
from areal_hpc.slurm.queue import QueuePoller, is_live_state
from areal_hpc.slurm.reasons import explain_reason

NODE_TASK_MODULE = "areal_hpc.launch.doctor.gpu.node_task"
TIME_LIMIT_MINUTES = 30
POLL_S = 2.0
QUEUE_AND_RUN_TIMEOUT_S = 1800.0
"""For the job to wait and run."""
FILE_VISIBLE_TIMEOUT_S = 60.0
"""After the job's end, for its last file to be seen here."""
LOG_TAIL_BYTES = 4096


class NodeTaskRequest(Struct, frozen=True):
    """What each node's task is told."""

    plan: GpuCheckPlan
    folder: str
    """Where the nodes meet, on shared storage."""


@dataclass(frozen=True, slots=True)
class GpuJobOptions:
    """How the job is submitted."""

    fileroot: Path
    options: JobOptions
    """Those of the trainer's job."""
    flags: tuple[str, ...]
    """Options of sbatch that decide where the job lands."""


def get_report_path(folder: Path) -> Path:
    return folder / "report.json"


def get_node_failure_path(folder: Path, node: int) -> Path:
    return folder / f"trouble.{node}"


def examine_nodes_by_slurm_job(
    plan: GpuCheckPlan, job: GpuJobOptions, print_line: Callable[[str], None]
) -> GpuReport:
    """Submit the job, wait for its report, and leave neither job nor file."""
    folder = job.fileroot.expanduser().resolve() / f".doctor-gpu.{secrets.token_hex(4)}"
    words = build_sbatch_command(plan, job, folder)
    folder.mkdir(parents=True)
    try:
        order = folder / "order.json"
        order.write_bytes(msgspec.json.encode(NodeTaskRequest(plan, str(folder))))
        JobPaths(folder).script.write_text(build_examination_script(plan, job.options, order))
        job_id = run_slurm_command(*words).split(";")[0].strip()
        print_line(f"job {job_id} was submitted: {plan.nodes} nodes, minutes once it runs")
        try:
            return _await_report(folder, job_id)
        finally:
            with suppress(ClusterError):
                run_slurm_command("scancel", "--quiet", job_id)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build_sbatch_command(plan: GpuCheckPlan, job: GpuJobOptions, folder: Path) -> list[str]:
    """The command that submits the job. Pure.

    Raises:
        RecipeError: The site does not say how many GPUs a node has.
    """
    options = job.options
    if plan.device == "cuda" and options.gpus_per_node is None:
        raise RecipeError(
            "how many GPUs a node has is not set, so the job cannot ask for them",
            key="cluster.slurm.gpus_per_node",
            hint="set cluster.slurm.gpus_per_node in the site file, for example 8",
        )
    gres = (options.gres or "gpu:{count}").replace("{count}", str(options.gpus_per_node))
    named = {
        "gres": gres if plan.device == "cuda" else None,
        "cpus-per-task": options.cpus_per_task,
        "mem": options.mem or "0",  # all of the node's: the default may not hold a server
        "exclude": options.exclude,
    }
    return [
        *("sbatch", "--parsable", "--job-name=areal-hpc-doctor", f"--time={TIME_LIMIT_MINUTES}"),
        *(f"--nodes={plan.nodes}", "--ntasks-per-node=1", "--no-requeue"),
        *(f"--{name}={value}" for name, value in named.items() if value),
        *(["--exclusive"] if options.exclusive or not options.cpus_per_task else []),
        *job.flags,
        f"--output={folder}/output",
        str(JobPaths(folder).script),
    ]


def build_examination_script(plan: GpuCheckPlan, options: JobOptions, request_file: Path) -> str:
    """The job's script: the site's set-up, then a task on each node. Pure."""
    srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0"]
    if options.cpus_per_task:  # since 22.05 srun does not take it over from sbatch
        srun.append(f"--cpus-per-task={options.cpus_per_task}")
    else:  # the node is the job's: its only task is not to be bound to one core
        srun.append("--cpu-bind=none")
    srun += format_flags(options.srun)
    task = [plan.pythons["agents"], "-m", NODE_TASK_MODULE, str(request_file)]
    lines = ["#!/bin/bash", *(options.setup or ()), shlex.join([*srun, *task])]
    return "\n".join(lines) + "\n"


def _await_report(folder: Path, job_id: str) -> GpuReport:
    queue, waits_for = QueuePoller(), "it did not start"
    give_up_at, ended_at = time.monotonic() + QUEUE_AND_RUN_TIMEOUT_S, None
    while time.monotonic() < give_up_at:
        if get_report_path(folder).exists():
            return add_failures_of_other_nodes(
                msgspec.json.decode(get_report_path(folder).read_bytes(), type=GpuReport),
                [path.read_text() for path in sorted(folder.glob("trouble.*"))],
            )
        look = queue.poll([job_id])
        found = look.jobs.get(job_id)
        if found and not is_live_state(found.state):
            ended_at = ended_at or time.monotonic()
            if time.monotonic() - ended_at > FILE_VISIBLE_TIMEOUT_S:
                said = read_tail_lines(folder / "output", LOG_TAIL_BYTES).decode(errors="replace")
                raise ClusterError(
                    f"job {job_id} ended without a report ({found.state.name}): {said.strip()}",
                    hint="areal-hpc doctor --check-node finds out whether nodes see the file root",
                )
        if found and found.reason:
            waits_for = explain_reason(found.reason).meaning
        time.sleep(max(POLL_S, queue.pause_s if look.outage else 0.0))
    raise ClusterError(
        f"job {job_id} gave no report within {QUEUE_AND_RUN_TIMEOUT_S / 60:.0f} min: {waits_for}",
        hint="try again when nodes are free",
    )


def add_failures_of_other_nodes(report: GpuReport, troubles: Sequence[str]) -> GpuReport:
    """The report, with what other nodes say of a network that failed: theirs is the cause. Pure."""
    rates = report.cluster_rates
    if not troubles or not isinstance(rates, Unmeasured):
        return report
    told = Unmeasured("; ".join([rates.reason, *troubles]), rates.hint, rates.is_failure)
    return msgspec.structs.replace(report, cluster_rates=told)

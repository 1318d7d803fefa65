"""Examination of GPU nodes: this machine, or the nodes of a Slurm job; facts and measured steps.

`python -m areal_hpc.launch.doctor.gpu.examination ORDER` is the task of such a job on each node.
The nodes meet in a folder on shared storage, where each leaves its report.
"""

import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from areal_hpc.errors import ArealError, RecipeError
from areal_hpc.jobs.node.topology import detect_task_position, find_own_address
from areal_hpc.jobs.processes.process_setup import set_up_logging
from areal_hpc.launch.doctor.checks import CheckResult, fail, ok, warn
from areal_hpc.launch.doctor.gpu.facts import NodeFacts, gather_node_facts
from areal_hpc.launch.doctor.gpu.judgments import (
    ISSUE_HINT,
    judge_differences_between_nodes,
    judge_facts,
    judge_network_rates,
    judge_node_rates,
    judge_run,
)
from areal_hpc.launch.doctor.gpu.plan import GpuCheckPlan
from areal_hpc.launch.doctor.gpu.steps import (
    STEPS,
    RankPlace,
    TinyRun,
    list_rank_gpus,
    measure_collectives,
    run_tiny_recipe,
)
from areal_hpc.launch.doctor.isolation import try_isolation
from areal_hpc.launch.doctor.slurm_job import await_files, submit_short_job
from areal_hpc.recipe.sections.cluster import JobOptions, format_flags
from areal_hpc.rundir.atomic import write_atomic
from areal_hpc.trainer.config import CollectiveRates

NODE_TASK_MODULE = "areal_hpc.launch.doctor.gpu.examination"
TIME_LIMIT_MINUTES = 30
QUEUE_AND_RUN_TIMEOUT_S = 1800.0
MeasuredT = TypeVar("MeasuredT")


class NodeReport(Struct, frozen=True):
    """One node. Only the first one of several has figures."""

    facts: NodeFacts
    results: list[CheckResult]
    node_rates: CollectiveRates | None = None
    """Between its own GPUs."""
    network_rates: CollectiveRates | None = None
    """Between the GPUs of all nodes."""
    run: TinyRun | None = None


class NodeTaskRequest(Struct, frozen=True):
    plan: GpuCheckPlan
    folder: str
    """Where the nodes meet, on shared storage."""


@dataclass(frozen=True)
class GpuExamination:
    """What `doctor --gpu` finds, found out once."""

    plan: GpuCheckPlan
    print_line: Callable[[str], None] = print
    fileroot: Path | None = None
    """Shared storage, for the job of `plan.nodes` nodes."""
    options: JobOptions = field(default_factory=JobOptions)
    """Of that job: the trainer's."""
    flags: tuple[str, ...] = ()
    """Options of sbatch that decide where it lands."""

    @cached_property
    def nodes(self) -> tuple[NodeReport, ...]:
        """Reports of all nodes; takes minutes."""
        if self.plan.nodes:
            return self._examine_nodes_of_job()
        with tempfile.TemporaryDirectory(
            prefix="areal-hpc-doctor-", ignore_cleanup_errors=True
        ) as folder:
            return (examine_node(self.plan, Path(folder), RankPlace(), self.print_line),)

    def list_results(self) -> Iterator[CheckResult]:
        if self.plan.device == "cpu":
            hosts = ", ".join(one.facts.host for one in self.nodes)
            finding = f"on processors of {hosts}: it says nothing about any GPU"
            yield warn("rehearsal", finding, "leave --device cpu out on a node with GPUs")
        for node in self.nodes:
            host = f"{node.facts.host}: " if self.plan.nodes else ""
            yield from (replace(one, finding=f"{host}{one.finding}") for one in node.results)
        if self.plan.device == "cuda":
            yield from judge_differences_between_nodes([one.facts for one in self.nodes])

    def _examine_nodes_of_job(self) -> tuple[NodeReport, ...]:
        assert self.fileroot is not None
        folder = self.fileroot.expanduser().resolve() / f".doctor-gpu.{secrets.token_hex(4)}"
        flags = [*list_sbatch_flags(self.plan, self.options), *self.flags]
        reports = [folder / f"report.{node}.json" for node in range(self.plan.nodes)]
        request_file = folder / "order.json"
        folder.mkdir(parents=True)
        try:
            request_file.write_bytes(msgspec.json.encode(NodeTaskRequest(self.plan, str(folder))))
            script = build_examination_script(self.plan, self.options, request_file)
            with submit_short_job(folder, script, flags, self.print_line) as job_id:
                await_files(job_id, reports, QUEUE_AND_RUN_TIMEOUT_S)
            return tuple(
                msgspec.json.decode(report.read_bytes(), type=NodeReport) for report in reports
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def examine_node(
    plan: GpuCheckPlan, folder: Path, rank_place: RankPlace, print_line: Callable[[str], None]
) -> NodeReport:
    """Gather and judge facts, then run every step, whatever became of the others."""
    facts = gather_node_facts(plan)
    # Without a job this machine's isolation has a check of its own.
    results = [*try_isolation(plan.agent)] if plan.nodes else []
    is_one_of_several = rank_place.nodes > 1
    if plan.device == "cuda":
        results += judge_facts(facts, plan.hca, is_one_of_several=is_one_of_several)
    gpus = list_rank_gpus(plan, facts.visible_gpus)
    report = NodeReport(facts, results)
    if not gpus:
        return report

    def measure(name: str, run: Callable[[], MeasuredT]) -> MeasuredT | None:
        print_line(f"{name} ...")
        try:
            return run()
        except ArealError as error:
            problem = error.problems[0]
            finding = "; ".join(one.message for one in error.problems)
            finding += f" (at {problem.key})" if problem.key else ""
            results.append(fail(name, finding, problem.hint or ISSUE_HINT))
        except OSError as error:
            results.append(fail(name, f"{type(error).__name__}: {error}", ISSUE_HINT))
        return None

    network = node = run = None
    if is_one_of_several:
        name = f"{rank_place.nodes} nodes"
        meeting = folder / "network"
        network = measure(name, lambda: measure_collectives(plan, gpus, meeting, rank_place))
        if network is not None:
            results.append(judge_network_rates(network, facts, rank_place.nodes))
    if rank_place.node:
        return report
    if len(gpus) > 1:
        node = measure("all-reduce", lambda: measure_collectives(plan, gpus, folder / "node"))
        if node is not None:
            results.append(judge_node_rates(node, facts))
        name = "tiny run"
        print_line(f"{STEPS} steps of a tiny model")
        run = measure(name, lambda: run_tiny_recipe(plan, gpus, folder / "run"))
        if run is not None:
            results.append(judge_run(run))
    else:
        results.append(ok("all-reduce", "not measured: only one GPU is visible"))
        finding = "not measured: one GPU is visible; SGLang and the trainer need one each"
        results.append(warn("tiny run", finding, "show doctor two GPUs, or add --nodes"))
    return NodeReport(facts, results, node, network, run)


def list_sbatch_flags(plan: GpuCheckPlan, options: JobOptions) -> list[str]:
    """Flags of sbatch that give the job its nodes, and on each all that a run may need. Pure.

    Raises:
        RecipeError: The site does not say how many GPUs a node has.
    """
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
    }
    return [
        *(f"--time={TIME_LIMIT_MINUTES}", f"--nodes={plan.nodes}", "--ntasks-per-node=1"),
        "--no-requeue",
        *(f"--{name}={value}" for name, value in named.items() if value),
        *(["--exclusive"] if options.exclusive or not options.cpus_per_task else []),
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


def main() -> None:
    """Examine this node of a job, and the network to the others."""
    set_up_logging()
    request = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=NodeTaskRequest)
    task = detect_task_position(os.environ)
    address = find_own_address(request.plan.interface, os.environ)
    rank_place = RankPlace(task.rank, task.num_tasks, address)
    folder = Path(request.folder)
    report = examine_node(request.plan, folder, rank_place, print)
    write_atomic(folder / f"report.{task.rank}.json", msgspec.json.encode(report))


if __name__ == "__main__":
    main()

"""One examination: facts, then the measured steps, each by itself whatever became of the others."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from areal_hpc.errors import ArealError
from areal_hpc.launch.doctor.gpu.collectives import list_rank_gpus, measure_collectives
from areal_hpc.launch.doctor.gpu.node_facts import gather_node_facts
from areal_hpc.launch.doctor.gpu.report import GpuCheckPlan, GpuReport, NodeFacts, Unmeasured
from areal_hpc.launch.doctor.gpu.slurm_job import GpuJobOptions, examine_nodes_by_slurm_job
from areal_hpc.launch.doctor.gpu.tiny_run import STEPS, run_tiny_recipe

NOT_MEASURED_WITHOUT_GPU = Unmeasured(
    "not run: no GPU is visible here", "run it on a node with a GPU, or rehearse with --device cpu"
)
MeasuredT = TypeVar("MeasuredT")


@dataclass(frozen=True)
class GpuExamination:
    """What `doctor --gpu` finds, found out once."""

    plan: GpuCheckPlan
    job: GpuJobOptions | None
    """How to reach the nodes by a Slurm job; None examines this machine."""
    print_line: Callable[[str], None] = print

    @cached_property
    def report(self) -> GpuReport:
        """All facts and measurements; takes minutes."""
        if self.job is not None:
            return examine_nodes_by_slurm_job(self.plan, self.job, self.print_line)
        folder = Path(tempfile.mkdtemp(prefix="areal-hpc-doctor-"))
        try:
            return measure_steps_on_node(
                self.plan, gather_node_facts(self.plan), folder, self.print_line
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def measure_steps_on_node(
    plan: GpuCheckPlan, node_facts: NodeFacts, folder: Path, print_line: Callable[[str], None]
) -> GpuReport:
    """Run every step on this node, in a folder of its own."""
    gpus = list_rank_gpus(plan, node_facts.visible_gpus)

    def measure(step_name: str, run: Callable[[], MeasuredT]) -> MeasuredT | Unmeasured:
        if not gpus:
            return NOT_MEASURED_WITHOUT_GPU
        print_line(f"{step_name} ...")
        return measure_or_explain_failure(run)

    return GpuReport(
        device=plan.device,
        nodes=(node_facts,),
        node_rates=measure(
            "all-reduce", lambda: measure_collectives(plan, gpus, folder / "collectives")
        ),
        cluster_rates=None,
        run=measure(
            f"{STEPS} steps of a tiny model", lambda: run_tiny_recipe(plan, gpus, folder / "run")
        ),
    )


def measure_or_explain_failure(run: Callable[[], MeasuredT]) -> MeasuredT | Unmeasured:
    """What a step measured, or why it did not."""
    try:
        return run()
    except ArealError as error:
        problem = error.problems[0]
        at = f" (at {problem.key})" if problem.key else ""
        return Unmeasured("; ".join(one.message for one in error.problems) + at, problem.hint)
    except OSError as error:
        return Unmeasured(f"{type(error).__name__}: {error}")

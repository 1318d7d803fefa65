"""Which nodes of an allocation run what, and what srun is told."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import RecipeError
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.slurm.scontrol import (
    Allocation,
    NodeShare,
    parse_node_shares,
    read_allocation,
    strip_job_variables,
)
from areal_hpc.slurm.steps import StepPlacement, build_step_command, place_steps

SHOWN = (
    "JobId=12 JobState=RUNNING NodeList=n[1-3] NumNodes=3 ReqNodeList=(null) JOB_GRES=gpu:h100:10 "
    "  Nodes=n[1-2] CPU_IDs=0-3,8 Mem=4000 GRES=gpu:h100:4(IDX:0-3),shard:2   "
    "Nodes=n3 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0,3) MinCPUsNode=1"
)


def trainer(ranks: int, gpus: int = 1) -> JobSpec:
    return JobSpec("trainer", "train", [], tasks=ranks, gpus_per_task=gpus)


def cells(count: int, gpus: int = 1, nodes: int = 1) -> list[JobSpec]:
    return [
        JobSpec(f"cell-{one}", "agents", [], tasks=nodes, is_task_a_node=True, gpus_per_task=gpus)
        for one in range(count)
    ]


def allocation(nodes: int, gpus: int, cpus: int = 16) -> Allocation:
    shares = tuple(NodeShare(f"n{one + 1}", cpus, 8000, gpus) for one in range(nodes))
    return Allocation("12", shares, None)


def nodes_of(jobs: list[JobSpec], of: Allocation) -> dict[str, tuple[str, ...]]:
    return {name: step.nodes for name, step in place_steps(jobs, of).items()}


def test_what_slurm_tells_of_each_node_is_read() -> None:
    assert parse_node_shares(SHOWN) == (
        NodeShare("n1", 5, 4000, 4),
        NodeShare("n2", 5, 4000, 4),
        NodeShare("n3", 1, 0, 2),
    )


def test_outside_of_an_allocation_the_error_names_the_way_out() -> None:
    with pytest.raises(RecipeError, match="in no allocation of Slurm") as refusal:
        read_allocation({})
    assert "salloc --nodes=2" in str(refusal.value)


@pytest.mark.parametrize(
    ("jobs", "of", "expected"),
    [
        ([trainer(4), *cells(2, 4)], allocation(3, 4), ["n1", "n2", "n3"]),
        ([trainer(8), *cells(1, 4)], allocation(3, 4), ["n1,n2", "n3"]),
        ([trainer(4), *cells(1, 4, nodes=2)], allocation(3, 4), ["n1", "n2,n3"]),
        ([trainer(2), *cells(3)], allocation(2, 4), ["n1", "n2", "n2", "n2"]),
        # The trainer's node last, and only where it has GPUs left.
        ([trainer(2), *cells(3, 2)], allocation(2, 4), ["n1", "n2", "n2", "n1"]),
        ([trainer(2), *cells(2)], allocation(1, 4), ["n1", "n1", "n1"]),
        ([trainer(6), *cells(1, 2)], allocation(3, 4), ["n1,n2", "n3"]),
    ],
)
def test_the_trainer_gets_the_first_nodes_and_cells_the_others(
    jobs: list[JobSpec], of: Allocation, expected: list[str]
) -> None:
    assert [",".join(nodes) for nodes in nodes_of(jobs, of).values()] == expected


@given(
    ranks=st.sampled_from([1, 2, 4, 6, 8]),
    n_cells=st.integers(1, 5),
    of_cell=st.integers(0, 4),
    n_nodes=st.integers(1, 5),
    gpus=st.integers(0, 8),
    cpus=st.integers(1, 12),
)
def test_no_node_gives_more_than_it_has(
    ranks: int, n_cells: int, of_cell: int, n_nodes: int, gpus: int, cpus: int
) -> None:
    jobs, of = [trainer(ranks), *cells(n_cells, of_cell)], allocation(n_nodes, gpus, cpus)
    try:
        placed = place_steps(jobs, of)
    except RecipeError:
        return
    assert [placed[job.name].tasks for job in jobs] == [job.tasks for job in jobs]
    for node in of.nodes:
        own = [step for step in placed.values() if node.name in step.nodes]
        assert sum(step.gpus_per_node for step in own) <= node.gpus
        assert sum(step.memory_mib_per_node for step in own) <= node.memory_mib
        assert sum(step.cpus_per_task * step.tasks_per_node for step in own) <= node.cpus
        assert all(step.cpus_per_task >= 1 for step in own)


def test_an_allocation_that_is_too_small_is_compared_with_what_jobs_need() -> None:
    with pytest.raises(RecipeError) as refusal:
        place_steps([trainer(4), *cells(3, 4)], allocation(2, 4))
    said = str(refusal.value)
    assert "trainer 4 ranks x 1 GPU, cell-0 1 node x 4 GPUs" in said
    assert "in all 16 GPUs and at least 7 CPUs; it has n1 4 GPUs, 16 CPUs; n2 4 GPUs" in said


def test_without_gpus_auto_means_the_processors() -> None:
    placed = place_steps([trainer(2), *cells(1, 2)], allocation(1, 0), is_cpu=True)
    assert [step.gpus_per_node for step in placed.values()] == [0, 0]


def test_srun_is_told_all_and_takes_nothing_from_the_environment() -> None:
    step = StepPlacement("trainer", ("n1", "n2"), 4, 4, cpus_per_task=3, memory_mib_per_node=500)
    command = build_step_command(
        step, "12", "trainer.3", "py", Path("/l.json"), Path("/trainer.3-%t.log")
    )
    wanted = "--exact --nodes=2 --nodelist=n1,n2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=3"
    assert wanted in " ".join(command)
    assert {"--jobid=12", "--mem=500M", "--gres=gpu:4"} < set(command)
    assert command[-4:] == ["-u", "-m", "areal_hpc.jobs.supervisor", "/l.json"]
    environ = {"SLURM_NTASKS": "9", "SLURM_CONF": "/c", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/"}
    assert strip_job_variables(environ) == {"SLURM_CONF": "/c", "PATH": "/"}

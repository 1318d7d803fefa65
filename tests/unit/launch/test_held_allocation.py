"""What of an allocation a run may use, and which allocations cannot carry it."""

from pathlib import Path

import pytest

from areal_hpc.launch.job_places import (
    find_allocation_shortages,
    limit_gpus,
)
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.slurm.scontrol import Allocation, NodeShare

CHECKOUT = Path(__file__).parents[3]
MIXED = Allocation("12", (NodeShare("n1", 8, 4000, 4), NodeShare("n2", 8, 4000, 1)), None)


def load(*overrides: str) -> Recipe:
    return load_recipe(CHECKOUT / "recipes/quickstart.yaml", list(overrides))


@pytest.mark.parametrize(
    ("wanted", "expected"), [("auto", [4, 1]), ("none", [0, 0]), (2, [2, 1]), (8, [4, 1])]
)
def test_a_run_takes_as_many_gpus_of_each_node_as_the_recipe_says(
    wanted: "int | str", expected: list[int]
) -> None:
    recipe = load(f"cluster.gpus={wanted}")
    usable = limit_gpus(MIXED, recipe.cluster.gpus)
    assert [node.gpus for node in usable.nodes] == expected
    assert [node.cpus for node in usable.nodes] == [8, 8]


def test_gpus_that_the_recipe_names_are_slurms_to_choose() -> None:
    recipe = load("cluster.gpus=[0,1]")
    [problem] = find_allocation_shortages(recipe, MIXED)  # each stage would say so
    assert problem.key == "cluster.gpus"
    assert "cluster.gpus=[0, 1] names GPUs" in problem.message
    assert "cluster.gpus=2" in problem.hint


def load_32b() -> Recipe:
    return load_recipe(
        CHECKOUT / "recipes/variants/code_qwen3_32b_128k.yaml",
        [
            f"model={{path: {CHECKOUT / 'tests/samples/models/Qwen3-32B'}, hub: null}}",
            *("trainer.parallel={tp: 8, pp: 1, cp: 2, dp: 1}", "inference.cells=1"),
            "cluster.slurm.gpus_per_node=null",
        ],
    )


def hold_big_nodes(memory_gib: int, count: int = 3) -> Allocation:
    nodes = (NodeShare(f"n{one}", 96, memory_gib << 10, 8) for one in range(1, count + 1))
    return Allocation("12", tuple(nodes), None)


def test_an_allocation_without_room_for_the_cell_is_told_what_would_do() -> None:
    [problem] = find_allocation_shortages(load_32b(), hold_big_nodes(240, count=2))
    assert "trainer 16 ranks x 1 GPU, cell-0 1 node x 8 GPUs, in all 24 GPUs" in problem.message

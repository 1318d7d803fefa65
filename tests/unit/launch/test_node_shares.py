"""Node shares: a job's requests at a site without settings, and its part of an allocation."""

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.job_places import find_allocation_shortages, limit_gpus
from areal_hpc.launch.plan import plan_run
from areal_hpc.launch.resources import add_node_share_options
from areal_hpc.launch.slurm_launcher import build_remaining_job_requests
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.scontrol import Allocation, NodeShare
from areal_hpc.slurm.submit import render_script
from tests.support.environments import CHECKOUT

RECIPE = CHECKOUT / "recipes" / "gpu64_math_qwen2.5_7b.yaml"
MODEL = f"model={{hub: null, path: {CHECKOUT}/tests/samples/models/Qwen2.5-Math-7B-Instruct}}"
SMALLEST_SITE = ("cluster.slurm.partition=gpu", "cluster.slurm.gpus_per_node=8")


def recipe_of(*overrides: str) -> Recipe:
    return load_recipe(RECIPE, [*SMALLEST_SITE, MODEL, *overrides])


def jobs_of(recipe: Recipe) -> list[JobSpec]:
    return [job for stage in plan_run(recipe, RunPaths(Path("/run"))) for job in stage.jobs]


def lines_of(recipe: Recipe, job: str) -> list[str]:
    requests = {one.job: one for one in build_remaining_job_requests(recipe, Path("/home/ada"))}
    return render_script(requests[job]).splitlines()


def test_the_smallest_site_is_asked_for_processors_and_memory() -> None:
    trainer = lines_of(recipe_of(), "trainer")
    assert "#SBATCH --cpus-per-task=4" in trainer
    assert [line for line in trainer if line.startswith("#SBATCH --mem=")] == ["#SBATCH --mem=97G"]
    assert " --cpus-per-task=4 " in trainer[-1]
    cell = lines_of(recipe_of(), "cell-0")
    assert "#SBATCH --cpus-per-task=36" in cell
    assert "#SBATCH --mem=72G" in cell


def test_what_the_site_says_is_kept_and_whole_nodes_are_left_whole() -> None:
    recipe = recipe_of(
        "cluster.slurm.sbatch.mem=100G", "cluster.slurm.jobs.cell.sbatch.cpus-per-task=9"
    )
    slurm = add_node_share_options(recipe, jobs_of(recipe))
    for job, cpus in (("trainer", 4), ("cell-0", 9)):
        flags = slurm.get_options_of_job(job).sbatch
        assert flags == {"mem": "100G", "cpus-per-task": cpus}
    unset = recipe_of(
        "cluster.slurm.sbatch={exclusive: true}", "cluster.slurm.sbatch.exclusive=false"
    )
    assert add_node_share_options(unset, jobs_of(unset)) != unset.cluster.slurm
    for overrides in (
        ["cluster.slurm.sbatch.exclusive=true"],
        ["cluster.slurm.sbatch={mem-per-gpu: 100G, cpus-per-gpu: 8}"],
        ["trainer.device=cpu"],
    ):
        kept = recipe_of(*overrides)
        assert add_node_share_options(kept, jobs_of(kept)) == kept.cluster.slurm


def test_memory_that_cannot_be_known_is_a_problem_of_the_plan() -> None:
    unknown = ("model={hub: someone/unheard-of, path: null}",)
    with pytest.raises(RecipeError, match="the memory that the trainer job needs") as refusal:
        build_remaining_job_requests(recipe_of(*unknown), Path("/home/ada"))
    assert "at: cluster.slurm.jobs.trainer.sbatch.mem" in str(refusal.value)
    assert "areal-hpc prefetch" in str(refusal.value)
    assert "or set it (as in 200G)" in str(refusal.value)
    assert build_remaining_job_requests(
        recipe_of(*unknown, "cluster.slurm.jobs.trainer.sbatch.mem=900G"), Path("/")
    )


MIXED = Allocation("12", (NodeShare("n1", 8, 4000, 4), NodeShare("n2", 8, 4000, 1)), None)


def load(*overrides: str) -> Recipe:
    return load_recipe(CHECKOUT / "recipes/quickstart.yaml", list(overrides))


@pytest.mark.parametrize(
    ("wanted", "expected"), [("auto", [4, 1]), ("none", [0, 0]), (2, [2, 1]), (8, [4, 1])]
)
def test_a_run_takes_the_gpus_that_a_recipe_says(wanted: "int | str", expected: list[int]) -> None:
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
    nodes = (NodeShare(f"n{number}", 96, memory_gib << 10, 8) for number in range(1, count + 1))
    return Allocation("12", tuple(nodes), None)


def test_an_allocation_without_room_for_the_cell_is_told_what_would_do() -> None:
    [problem] = find_allocation_shortages(load_32b(), hold_big_nodes(240, count=2))
    assert "trainer 16 ranks x 1 GPU, cell-0 1 node x 8 GPUs, in all 24 GPUs" in problem.message

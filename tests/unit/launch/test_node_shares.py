"""Processors and memory that a job with GPUs asks for at a site that says nothing of them."""

from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.plan import plan_run
from areal_hpc.launch.resources import add_node_share_options
from areal_hpc.launch.slurm_launcher import build_remaining_job_requests
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.paths import RunPaths
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
    told = recipe_of(
        "cluster.slurm.sbatch.mem=100G", "cluster.slurm.jobs.cell.sbatch.cpus-per-task=9"
    )
    slurm = add_node_share_options(told, jobs_of(told))
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

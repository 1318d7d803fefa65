"""GPUs of one machine are shared out among the jobs of a stage."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.node import VisibleGpus
from areal_hpc.launch.job_places import (
    GpuAssignment,
    assign_gpus,
    find_gpu_problems,
    find_usable_gpus,
)
from areal_hpc.launch.plan import JobStage, plan_run
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def recipe_of(device: str, *overrides: str) -> Recipe:
    devices = (f"trainer.device={device}",)
    return load_recipe(QUICKSTART, [*devices, "trainer.batch_size=64", *overrides])


def stages_of(recipe: Recipe) -> tuple[JobStage, ...]:
    return plan_run(recipe, RunPaths(Path("/run")))


def shown(*ids: str) -> VisibleGpus:
    return VisibleGpus(ids, f"CUDA_VISIBLE_DEVICES={','.join(ids)!r}")


def refusal_of(recipe: Recipe, visible: VisibleGpus) -> str:
    with pytest.raises(RecipeError) as refusal:
        assign_gpus(stages_of(recipe)[-1], visible, recipe)
    return str(refusal.value)


def given_out(assignment: GpuAssignment) -> list[str]:
    return [gpu for tasks in assignment.values() for ids in tasks for gpu in ids]


@given(
    dp=st.sampled_from([1, 2, 4]),
    cells=st.integers(1, 3),
    replicas=st.integers(1, 3),
    tp=st.sampled_from([1, 2, 4]),
    spans_nodes=st.booleans(),
    evaluates_apart=st.booleans(),
    n_visible=st.integers(1, 48),
    device=st.sampled_from(["auto", "cuda"]),
)
def test_every_task_has_gpus_of_its_own_or_the_sum_is_told(
    dp: int, cells: int, replicas: int, tp: int, spans_nodes: bool, evaluates_apart: bool,
    n_visible: int, device: str,
) -> None:  # fmt: skip
    nodes = 2 if spans_nodes and tp > 1 else 1
    replicas = 1 if nodes > 1 else replicas
    recipe = recipe_of(
        device,
        f"trainer.parallel.dp={dp}",
        f"inference={{cells: {cells}, replicas_per_cell: {replicas}, tp: {tp}}}",
        f"inference.nodes_per_replica={nodes}",
        f"evaluation.separate_cell={evaluates_apart}",
    )
    visible = shown(*(f"GPU-{number}" for number in range(n_visible)))
    serving = (cells + evaluates_apart) * replicas * tp
    if dp + serving > n_visible:
        refusal = refusal_of(recipe, visible)
        assert f"it needs {dp + serving} at once" in refusal
        assert f"this machine shows {n_visible} (CUDA_VISIBLE_DEVICES=" in refusal
        assert f"trainer {dp} ranks x 1 = {dp}" in refusal
        each = f"{replicas} replicas x tp {tp} = {replicas * tp}"
        assert all(f"cell-{index} {each}" in refusal for index in range(cells))
        assert (f"evaluation {each}" in refusal) is evaluates_apart
        return
    for stage in stages_of(recipe):
        assignment = assign_gpus(stage, visible, recipe)
        assert [len(assignment[job.name]) for job in stage.jobs] == [j.tasks for j in stage.jobs]
        for job in stage.jobs:
            assert all(len(ids) == job.gpus_per_task > 0 for ids in assignment[job.name])
        used = given_out(assignment)
        assert len(set(used)) == len(used)
        assert set(used) <= set(visible.ids)


def test_auto_without_any_gpu_is_the_cpu_and_cuda_is_refused() -> None:
    recipe = recipe_of("cpu")
    assert given_out(assign_gpus(stages_of(recipe)[1], shown("0", "1", "2"), recipe)) == []
    nothing = VisibleGpus((), "/dev/nvidia[0-9]*")
    recipe = recipe_of("auto")
    assert given_out(assign_gpus(stages_of(recipe)[1], nothing, recipe)) == []
    assert find_gpu_problems(recipe, {"CUDA_VISIBLE_DEVICES": ""}) == []
    refusal = refusal_of(recipe_of("cuda"), nothing)
    assert "it needs 2 at once" in refusal
    assert "this machine shows 0 (/dev/nvidia[0-9]*)" in refusal
    assert "try: at least 2 are needed" in refusal
    assert "use trainer.device=cpu" in refusal


def test_every_stage_that_lacks_gpus_is_reported() -> None:
    recipe = recipe_of("cuda", "trainer.parallel.dp=4")
    sft, train = find_gpu_problems(recipe, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert "the stage sft: it needs 4 at once" in sft.message
    assert sft.key == "trainer.parallel"
    assert "the stage train: it needs 5 at once" in train.message
    (left,) = find_gpu_problems(recipe, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert left.key == train.key


def test_the_recipe_narrows_what_the_launcher_sees() -> None:
    recipe = recipe_of("cuda", "cluster.gpus=[9, 5]")
    usable = find_usable_gpus(recipe, {"CUDA_VISIBLE_DEVICES": "3,5,7,9"})
    assert assign_gpus(stages_of(recipe)[-1], usable, recipe) == {
        "trainer": [["9"]],
        "cell-0": [["5"]],
    }
    (problem,) = find_gpu_problems(recipe, {"CUDA_VISIBLE_DEVICES": "3,5"})
    assert problem.key == "cluster.gpus"
    assert "names GPUs 9; this machine shows 3, 5 (CUDA_VISIBLE_DEVICES='3,5')" in problem.message
    hidden = recipe_of("auto", "cluster.gpus=none")
    usable = find_usable_gpus(hidden, {"CUDA_VISIBLE_DEVICES": "3,5"})
    assert given_out(assign_gpus(stages_of(hidden)[-1], usable, hidden)) == []
    (problem,) = find_gpu_problems(
        recipe_of("cuda", "cluster.gpus=1"), {"CUDA_VISIBLE_DEVICES": "3,5"}
    )
    assert "this machine shows 1 (cluster.gpus=1 of CUDA_VISIBLE_DEVICES='3,5')" in problem.message

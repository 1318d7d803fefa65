"""Host memory: each process's bytes against arithmetic, and what does not fit a node."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.jobs.processes.signals import StopEvent
from areal_hpc.launch.foreground_launcher import run
from areal_hpc.launch.resources import memory
from areal_hpc.launch.resources.memory import ProcessMemory
from areal_hpc.launch.slurm_launcher import submit
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.trainer.model.families.architecture import read_architecture
from areal_hpc.trainer.model.memory_estimate import GIB, estimate_trainer_memory
from areal_hpc.view.state.live_progress import PlainReporter
from tests.support.stand_in_pythons import stand_in_pythons

CHECKOUT = Path(__file__).parents[3]
MODEL = CHECKOUT / "tests/samples/models/Qwen3-32B"
PARAMETERS = 32_762_123_264


def load(*overrides: str) -> Recipe:
    model = f"model={{path: {MODEL}, hub: null}}"
    recipe = CHECKOUT / "recipes/variants/code_qwen3_32b_128k.yaml"
    layout = "trainer.parallel={tp: 8, pp: 1, cp: 2, dp: 1}"
    return load_recipe(recipe, [model, layout, "cluster.slurm.gpus_per_node=8", *overrides])


def find(recipe: Recipe, process: str) -> ProcessMemory:
    (found,) = [one for one in memory.estimate_host_memory(recipe) if one.process == process]
    return found


def test_each_rank_copies_its_part_of_a_checkpoint() -> None:
    trainer = find(load(), "trainer")
    assert trainer.fixed_bytes_by_use == {"checkpoint": 14 * PARAMETERS // 16}
    assert trainer.processes_per_node == 8
    assert (
        trainer.bytes_per_process
        == trainer.fixed_bytes_by_use["checkpoint"] + memory.BASE_BYTES["trainer"]
    )


def test_what_is_offloaded_lies_on_the_host() -> None:
    recipe = load("trainer.offload={activations: true, optimizer: true}")
    estimate = estimate_trainer_memory(read_architecture(MODEL), recipe.trainer)
    trainer = find(recipe, "trainer")
    assert trainer.fixed_bytes_by_use["optimizer"] == estimate.host_optimizer
    assert trainer.peak_extra_bytes_by_use["activations"] == estimate.host_activations > GIB
    # All master weights and moments, the norms of every tensor-parallel rank among them.
    assert estimate.host_optimizer * 16 == pytest.approx(12 * PARAMETERS, rel=1e-3)


def test_on_a_cpu_the_host_holds_what_a_gpu_would() -> None:
    cpu = ("trainer.device=cpu", "inference.device=cpu", "inference.max_total_tokens=4096")
    recipe = load(*cpu, "trainer.recompute=full")
    trainer, server = find(recipe, "trainer"), find(recipe, "server")
    # A tensor-parallel rank has 6 bytes a parameter, its share of 16 ranks 12 more.
    assert trainer.fixed_bytes_by_use["state"] == pytest.approx(
        PARAMETERS * (6 / 8 + 12 / 16), rel=1e-3
    )
    assert trainer.peak_extra_bytes_by_use["passes"] > GIB
    assert server.fixed_bytes_by_use["weights"] == pytest.approx(2 * PARAMETERS, rel=1e-3)
    assert server.peak_extra_bytes_by_use["KV cache"] == 4096 * 64 * 2 * 8 * 128 * 2


def find_problems(*overrides: str, **environment: Any) -> list[Problem]:
    recipe = load(*overrides)
    if environment:
        return memory.find_allocation_memory_problems(recipe, environment)
    return memory.find_host_memory_problems(recipe, memory.get_node_bytes_by_job(recipe))


def test_a_node_with_too_little_memory_is_refused() -> None:
    assert find_problems("cluster.slurm.mem=240G") == []
    assert find_problems("cluster.slurm.mem=null") == []
    (problem,) = find_problems("cluster.slurm.mem=200G")
    assert problem.key == "cluster.slurm.jobs.trainer.mem"
    assert "needs 213.6 GiB" in problem.message
    assert "checkpoint 26.7 in each of 8 trainer processes" in problem.message
    assert "a node has 200.0 GiB" in problem.message
    offload = "trainer.offload.optimizer=true"
    (problem,) = find_problems("cluster.slurm.mem=240G", offload)
    assert "trainer.offload.optimizer=false" in problem.hint


def test_a_run_within_an_allocation_has_the_memory_of_the_allocation() -> None:
    assert find_problems(SLURM_MEM_PER_NODE="245760") == []
    assert find_problems(OTHER="1") == []
    (problem,) = find_problems(SLURM_MEM_PER_NODE="102400")
    assert "a node has 100.0 GiB" in problem.message


def test_a_run_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    quickstart = CHECKOUT / "recipes/quickstart.yaml"
    tight = (f"cluster.fileroot={tmp_path / 'runs'}", "cluster.slurm.mem=1M")
    recipe = load_recipe(quickstart, [*tight, *stand_in_pythons(tmp_path)])
    paths, said = RunPaths(recipe.run_dir), list[str]()
    with pytest.raises(RecipeError, match=r"of host memory a node \(checkpoint"):
        run(recipe, reporter=PlainReporter(paths, 1, 0), stop=StopEvent())
    with pytest.raises(RecipeError) as caught:
        submit(recipe, print_line=said.append)
    keys = [problem.key for problem in caught.value.problems]
    assert keys[:2] == ["cluster.slurm.jobs.trainer.mem", "cluster.slurm.jobs.cell.mem"]
    assert not paths.root.exists()
    assert said == []

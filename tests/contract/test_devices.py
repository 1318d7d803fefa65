"""No two servers or ranks of a GPU recipe share a GPU, on one machine of 1 to 8 made-up GPUs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from areal_hpc.errors import RecipeError
from areal_hpc.inference.config import InferenceJobConfig, build_server_command
from areal_hpc.inference.server.command import ServerPorts
from areal_hpc.jobs.node.gpus import VisibleGpus
from areal_hpc.launch.plan import plan_run
from areal_hpc.launch.resources.gpu_assignment import assign_gpus
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.paths import RunPaths
from tests.support.made_up_gpus import count_gpus, list_gpu_recipes

PORTS = ServerPorts(30000, 31000)


@pytest.mark.parametrize("path", list_gpu_recipes(), ids=lambda path: path.stem)
def test_each_server_and_rank_has_gpus_of_its_own(path: Path, tmp_path: Path) -> None:
    fileroot = f"cluster.fileroot={tmp_path}"
    recipe = load_recipe(path, ["trainer.device=cuda", "inference.device=cuda", fileroot])
    recipe.run_dir.mkdir(parents=True)
    RunPaths(recipe.run_dir).recipe.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    for count in (1, 2, 4, 8):
        visible = VisibleGpus(tuple(map(str, range(count))), f"{count} made-up GPUs")
        for stage in plan_run(recipe, RunPaths(recipe.run_dir)):
            try:
                assignment = assign_gpus(stage, visible, recipe)
            except RecipeError:
                assert count < count_gpus(recipe), stage.name
                continue
            used = [gpu for job in stage.jobs for gpu in list_used(job, assignment[job.name])]
            assert used
            assert len(set(used)) == len(used), (stage.name, count)


def list_used(job: JobSpec, gpus_by_task: list[list[str]]) -> Iterator[str]:
    """The GPUs of ranks, and of those that a server's parent sees the consecutive ones it takes."""
    for gpus in gpus_by_task:
        configs = [process.config for process in job.processes if process.name == "inference"]
        if not configs:
            yield from gpus
        for config in map(InferenceJobConfig.model_validate, configs):
            inference = config.recipe.inference
            for index in range(inference.replicas_per_cell):
                argv = build_server_command(config, index, 0, PORTS).argv
                first = int(argv[argv.index("--base-gpu-id") + 1])
                yield from gpus[first : first + inference.tp]

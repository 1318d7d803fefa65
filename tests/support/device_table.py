"""GPUs, processors and memory that processes of each GPU recipe get, as text."""

from collections.abc import Iterator
from pathlib import Path

from areal_hpc.errors import RecipeError
from areal_hpc.inference.config import InferenceJobConfig, build_server_command
from areal_hpc.inference.server.command import ServerPorts
from areal_hpc.jobs.node.gpus import VisibleGpus
from areal_hpc.launch.plan import JobStage, plan_run
from areal_hpc.launch.resources.gpu_assignment import assign_gpus
from areal_hpc.launch.resources.node_shares import add_cpu_and_memory_options
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.jobs import JobSpec
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.slurm.batch_script.script import compute_resources
from tests.support.environments import CHECKOUT

GPU_COUNTS = (1, 2, 4, 8)
_PORTS = ServerPorts(30000, 31000)


def render_devices() -> str:
    """A paragraph for each recipe that runs on GPUs: on one machine, and under Slurm."""
    return "\n\n".join("\n".join(_render_recipe(path)) for path in list_gpu_recipes()) + "\n"


def list_gpu_recipes() -> list[Path]:
    """The shipped recipes whose trainer and servers use GPUs."""
    paths = sorted((CHECKOUT / "recipes").rglob("*.yaml"), key=lambda path: path.name)
    return [path for path in paths if load_recipe(path).trainer.device != "cpu"]


def _render_recipe(path: Path) -> Iterator[str]:
    devices = ["trainer.device=cuda", "inference.device=cuda"]  # with `auto` it is this machine's
    recipe = load_recipe(path, ["cluster.slurm.gpus_per_node=8", *devices])
    yield path.name
    for stage in plan_run(recipe, RunPaths(recipe.run_dir)):
        for count in GPU_COUNTS:
            yield f"  {stage.name}, {count} GPU{'' if count == 1 else 's'} of one machine"
            yield from (f"    {line}" for line in _render_machine(recipe, stage, count))
        yield f"  {stage.name}, nodes of 8 GPUs under Slurm"
        yield from (f"    {line}" for line in _render_slurm(recipe, stage))


def _render_machine(recipe: Recipe, stage: JobStage, count: int) -> Iterator[str]:
    visible = VisibleGpus(tuple(f"gpu{number}" for number in range(count)), f"{count} fake GPUs")
    try:
        assignment = assign_gpus(stage, visible, recipe)
    except RecipeError as error:
        yield f"refused; {error.problems[0].hint}"
        return
    for job in stage.jobs:
        for rank, ids in enumerate(assignment[job.name]):
            yield f"{job.name} task {rank}: CUDA_VISIBLE_DEVICES={','.join(ids)}"
            yield from (f"  {line}" for line in _render_servers(job, ids))


def _render_servers(job: JobSpec, ids: list[str]) -> Iterator[str]:
    """What SGLang makes of the GPUs that its parent sees: some consecutive ones for a server."""
    for process in job.processes:
        if process.name != "inference":
            continue
        config = InferenceJobConfig.model_validate(process.config)
        for index in range(config.inference.replicas_per_cell):
            argv = build_server_command(config, index, 0, _PORTS).argv
            first = int(argv[argv.index("--base-gpu-id") + 1])
            used = ids[first : first + config.inference.tp]
            yield f"server {index}: --base-gpu-id {first}, {','.join(used)}"


def _render_slurm(recipe: Recipe, stage: JobStage) -> Iterator[str]:
    slurm = add_cpu_and_memory_options(recipe, stage.jobs)
    shown: set[str] = set()
    for job in stage.jobs:
        options = slurm.get_options_of_job(job.name)
        resources = compute_resources(job, options)
        share = (
            f"{resources.nodes} nodes, {resources.tasks_per_node} tasks and "
            f"{resources.gpus_per_node} GPUs each, {options.cpus_per_task} CPUs a task, "
            f"{options.mem} of memory"
        )
        if share not in shown:  # cells are alike
            yield f"{job.name}: {share}"
        shown.add(share)

"""Plan of a GPU examination from a recipe, or from the defaults where there is none. Pure."""

from areal_hpc.jobs.environment import (
    get_interpreter,
    get_interpreters,
    get_train_and_serve_variables,
)
from areal_hpc.launch.doctor.gpu.report import Device, GpuCheckPlan
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.paths import ROLES


def build_check_plan(
    recipe: Recipe | None, slurm: SlurmConfig, device: Device, nodes: int
) -> GpuCheckPlan:
    """What to examine with: interpreters, variables and flags are those that a run would have."""
    variables = get_train_and_serve_variables(trainer_device=device, inference_device=device)
    network = slurm.network.build_environment_variables() if nodes else {}
    environments = recipe.cluster if recipe is not None else None
    return GpuCheckPlan(
        device=device,
        nodes=nodes,
        pythons=(
            get_interpreters(recipe)
            if recipe is not None
            else {role: get_interpreter(role, "auto") for role in ROLES}
        ),
        variables={
            role: {
                **network,
                **variables.get(role, {}),
                **(getattr(environments, role).variables if environments else {}),
            }
            for role in ROLES
        },
        inference=(recipe.inference if recipe else InferenceConfig()).model_dump(mode="json"),
        trainer_dtype=(
            "float32" if device == "cpu" else recipe.trainer.dtype if recipe else "bfloat16"
        ),
        # On nodes of a job Slurm says which.
        gpus=recipe.cluster.gpus if recipe and not nodes else "auto",
        interface=slurm.network.interface,
        hca=slurm.network.hca,
        agent=(
            recipe.rollout.agent.model_dump(mode="json")
            if recipe and recipe.rollout.agent.isolation
            else None
        ),
    )

"""Plan of a GPU examination: the interpreters, variables and flags that a run would have."""

from typing import Any, Literal

from msgspec import Struct

from areal_hpc.jobs.environment import (
    get_interpreter,
    get_interpreters,
    get_train_and_serve_variables,
)
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.cluster import SlurmConfig
from areal_hpc.recipe.sections.inference import InferenceConfig
from areal_hpc.rundir.paths import ROLES

Device = Literal["cpu", "cuda"]


class GpuCheckPlan(Struct, frozen=True):
    """What is examined, and with what: read from a recipe, or the defaults of one."""

    device: Device
    """`cpu` rehearses the same steps on processors."""
    nodes: int
    """Nodes of a Slurm job; 0: this machine, without one."""
    pythons: dict[str, str]
    """By role."""
    variables: dict[str, dict[str, str]]
    """By role."""
    inference: dict[str, Any]
    """The recipe's section."""
    trainer_dtype: Literal["float32", "bfloat16"]
    gpus: str | int | tuple[str | int, ...] = "auto"
    """`cluster.gpus`, for this machine alone."""
    interface: str = ""
    hca: str = ""
    """InfiniBand adapters that the site names."""
    agent: dict[str, Any] | None = None
    """The recipe's section `rollout.agent` where it gives agents sandboxes."""


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
        hca=slurm.network.nccl.get("NCCL_IB_HCA", ""),
        agent=(
            recipe.rollout.agent.model_dump(mode="json")
            if recipe and recipe.rollout.agent.isolation
            else None
        ),
    )

"""Configuration of a job's processes beside the recipe: interpreters, variables, facts."""

import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from areal_hpc.checkout import PACKAGE_DIR
from areal_hpc.jobs.processes.process_setup import PROMETHEUS_VARIABLE
from areal_hpc.recipe.base import BaseConfig
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.recipe.sections.sandbox import ISOLATION_VARIABLE
from areal_hpc.rundir.jobs import ProcessSpec
from areal_hpc.rundir.paths import ENVIRONMENTS, ROLES, RunPaths
from areal_hpc.rundir.run_inputs import read_run_recipe

IMAGE_CHECKOUT_DIR = Path("/opt/areal_hpc")
"""Checkout, with its environments, in the images of `slurm/containers`."""


class ProcessConfig(BaseConfig):
    """Facts that only the launcher knows; a process reads everything else from the run's recipe."""

    ENTRY: ClassVar[str]
    """`package.module:function` that parses the configuration."""
    ROLE: ClassVar[Literal["train", "agents"]]
    """Environment whose Python runs the process."""

    run_dir: Path

    @cached_property
    def recipe(self) -> Recipe:
        """The run's resolved recipe. It may hold secrets, so no copy of it is written."""
        return Recipe.model_validate(read_run_recipe(RunPaths(self.run_dir).recipe))

    def build_process_spec(self, process_name: str, **options: Any) -> ProcessSpec:
        """Build the process's spec; `options` are further fields of `ProcessSpec`."""
        config = self.model_dump(mode="json")
        return ProcessSpec(process_name, self.ROLE, self.ENTRY, config, **options)


GPU_VARIABLES = {
    # GPUs have the numbers that nvidia-smi, Slurm and the launcher's assignment give them.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Variables of every process that uses GPUs."""
NVLS_VARIABLE = "NCCL_NVLS_ENABLE"
NCCL_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", NVLS_VARIABLE: "0"}
"""SGLang's defaults (sglang/srt/entrypoints/engine.py). Both ends of a weight broadcast need the
same `NCCL_CUMEM_ENABLE`: else each end makes memory handles that the other cannot open."""
TRAINER_GPU_VARIABLES = {
    # One queue of kernels: communication and the matrix product that hides it keep their order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Packs differ in size. Not for SGLang, whose all-reduce hands memory to other processes.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Megatron's router would compile a function a layer, at every new shape, for .1 ms a pass.
    "TORCHDYNAMO_DISABLE": "1",
}

TRAINER_WEIGHT_UPDATE_VARIABLES = {
    # No thread of torch watches the group. That thread would end the process when a work fails or
    # is late; with error handling off it would still dump the world's group and then end it.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Variables that the trainer sets once its own groups exist, for the groups of weight updates: a
receiver that dies must not take the trainer along. torch reads them as a group is made
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; the order to dump is one per process)."""
FLIGHT_RECORDER_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its name before torch 2.9
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Variables that record the last collectives of each trainer rank. When one fails or is late they
are written to a file in the run's logs (`trainer/process_groups.py`)."""


def get_interpreter(role: str, configured_python: str) -> str:
    """Return the Python that runs a role's processes.

    `auto` means that of the checkout's environment for the role if it exists, else the current
    interpreter.
    """
    if configured_python != "auto":
        return configured_python
    candidate = _get_environment_python(PACKAGE_DIR.parent, role)
    return str(candidate) if candidate.exists() else sys.executable


def get_interpreters(recipe: Recipe) -> dict[str, str]:
    """Return the interpreter of each role: the recipe's, else this checkout's or the images'."""
    in_image = recipe.cluster.slurm.container.kind != "none"
    named = {role: str(getattr(recipe.cluster, role).python) for role in ROLES}
    return {
        role: str(_get_environment_python(IMAGE_CHECKOUT_DIR, role))
        if in_image and python == "auto"
        else get_interpreter(role, python)
        for role, python in named.items()
    }


def _get_environment_python(checkout: Path, role: str) -> Path:
    return checkout / ".venvs" / ENVIRONMENTS[role] / "bin" / "python"


def build_role_variables(
    recipe: Recipe,
    shared_variables: Mapping[str, str] | None = None,
    *,
    trainer_is_apart: bool = False,
) -> dict[str, dict[str, str]]:
    """Build the variables of each role's processes, without those that the recipe names.

    A trainer that shares no node with servers may reduce in NVLink's switches (NVLS). A group uses
    as many NVLS channels as the rank with the fewest (`initTransportsRank` of NCCL's init.cc), so
    groups of weight updates, whose servers have none, do without. No test has run it on GPUs.
    """
    by_role = get_computing_variables(recipe.trainer.device)
    if trainer_is_apart:
        by_role["train"].pop(NVLS_VARIABLE, None)
    by_role["agents"] = {ISOLATION_VARIABLE: recipe.reward.isolation}
    if recipe.cluster.prometheus:
        for role in ("train", "agents"):
            by_role[role] = {**by_role[role], PROMETHEUS_VARIABLE: "1"}
    return {role: {**(shared_variables or {}), **by_role.get(role, {})} for role in ROLES}


def get_computing_variables(device: str) -> dict[str, dict[str, str]]:
    if device != "cpu":
        gpu_variables = GPU_VARIABLES | NCCL_VARIABLES
        trainer_variables = gpu_variables | TRAINER_GPU_VARIABLES | FLIGHT_RECORDER_VARIABLES
        return {"train": trainer_variables, "serve": gpu_variables}
    # Megatron decorates functions with torch.compile at its import, which imports the compiler: a
    # quarter of a rank's processor time until it starts, and no CPU run compiles.
    return {"train": {"TORCHDYNAMO_DISABLE": "1"}, "serve": {}}

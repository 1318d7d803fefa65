"""Facts for a job's processes beside their run's recipe: configuration, interpreter, variables."""

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
"""Where the images of `slurm/containers` hold the checkout and its environments."""


class ProcessConfig(BaseConfig):
    """What the launcher alone knows of one process; all else it reads from the run's recipe."""

    ENTRY: ClassVar[str]
    """`package.module:function` that parses it."""
    ROLE: ClassVar[Literal["train", "agents"]]
    """Which environment's Python runs the process."""

    run_dir: Path

    @cached_property
    def recipe(self) -> Recipe:
        """The run's resolved recipe, which may hold secrets: no copy of it is written."""
        return Recipe.model_validate(read_run_recipe(RunPaths(self.run_dir).recipe))

    def build_process_spec(self, process_name: str, **options: Any) -> ProcessSpec:
        """The process with this configuration; `options` are further fields of `ProcessSpec`."""
        config = self.model_dump(mode="json")
        return ProcessSpec(process_name, self.ROLE, self.ENTRY, config, **options)


GPU_VARIABLES = {
    # GPUs have the numbers that nvidia-smi, Slurm and the launcher's assignment give them.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""Of every process that uses GPUs."""
NCCL_VARIABLES = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""SGLang's choice where nothing else is set, for both ends of a weight broadcast: with different
ones each makes memory handles that the other cannot open (sglang/srt/entrypoints/engine.py)."""
TRAINER_GPU_VARIABLES = {
    # One queue of kernels: communication and the matrix product that hides it keep their order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # Packs differ in size. Not for SGLang, whose all-reduce hands memory to other processes.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    # Megatron's router would compile a function a layer, at every new shape, for .1 ms a pass.
    "TORCHDYNAMO_DISABLE": "1",
}

TRAINER_WEIGHT_UPDATE_VARIABLES = {
    # No thread of torch's watches the group. The one that does ends the process when a work fails
    # or is late; with error handling off it still has the world's group dump and then end it.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
}
"""Set in the trainer once its own groups exist, for those of weight updates, which may fail: a
receiver that dies must not take the trainer along. Read as a group is made
(torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; the order to dump is one for the process)."""
FLIGHT_RECORDER_VARIABLES = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its name before torch 2.9
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""The last collectives of each trainer rank, written when one fails or is late. The rank names the
file, in the run's logs (`trainer/process_groups.py`)."""


def get_interpreter(role: str, configured_python: str) -> str:
    """The Python that runs a role's processes: the one configured, unless that is `auto`.

    Then it is that of the checkout's environment for the role if it exists, else the interpreter
    that runs now.
    """
    if configured_python != "auto":
        return configured_python
    candidate = _get_environment_python(PACKAGE_DIR.parent, role)
    return str(candidate) if candidate.exists() else sys.executable


def get_interpreters(recipe: Recipe) -> dict[str, str]:
    """The interpreter of each role: the recipe's, else this checkout's or the images'."""
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
    recipe: Recipe, shared_variables: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Variables of each role's processes, apart from those that are read from the recipe."""
    of_roles = get_computing_variables(recipe.trainer.device)
    of_roles["agents"] = {ISOLATION_VARIABLE: recipe.reward.isolation}
    if recipe.cluster.prometheus:
        for role in ("train", "agents"):
            of_roles[role] = {**of_roles[role], PROMETHEUS_VARIABLE: "1"}
    return {role: {**(shared_variables or {}), **of_roles.get(role, {})} for role in ROLES}


def get_computing_variables(device: str) -> dict[str, dict[str, str]]:
    if device != "cpu":
        of_gpus = GPU_VARIABLES | NCCL_VARIABLES
        of_trainer = of_gpus | TRAINER_GPU_VARIABLES | FLIGHT_RECORDER_VARIABLES
        return {"train": of_trainer, "serve": of_gpus}
    # As Megatron is imported it decorates functions with torch.compile, and that imports the
    # compiler: a quarter of a rank's processor time until it starts, and no CPU run compiles.
    return {"train": {"TORCHDYNAMO_DISABLE": "1"}, "serve": {}}

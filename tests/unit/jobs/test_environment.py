"""Variables of a job's processes."""

import pytest

from areal_hpc.jobs.config import build_role_variables
from areal_hpc.jobs.task_processes import select_role_variables
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import ProcessSpec
from tests.support.environments import CHECKOUT

GPU_RECIPE = CHECKOUT / "recipes" / "gpu8_gsm8k_qwen3_0.6b.yaml"


def test_both_ends_of_a_broadcast_have_the_same_settings_of_nccl() -> None:
    variables = build_role_variables(load_recipe(GPU_RECIPE))
    both = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    assert variables["serve"] == both
    assert both.items() <= variables["train"].items()
    assert variables["train"]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert variables["train"]["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert variables["agents"] == {"AREAL_HPC_REWARD_ISOLATION": "bwrap"}


def test_a_site_adds_its_own_and_a_cpu_needs_none() -> None:
    variables = build_role_variables(load_recipe(GPU_RECIPE), {"NCCL_SOCKET_IFNAME": "ib0"})
    assert {role["NCCL_SOCKET_IFNAME"] for role in variables.values()} == {"ib0"}
    unisolated = ["reward.isolation=none"]
    on_cpu = build_role_variables(load_recipe(CHECKOUT / "recipes/quickstart.yaml", unisolated))
    assert on_cpu == {
        "serve": {},
        "train": {"TORCHDYNAMO_DISABLE": "1"},
        "agents": {"AREAL_HPC_REWARD_ISOLATION": "none"},
    }


@pytest.mark.parametrize(
    ("role", "uses_gpus", "expected"),
    [
        ("train", True, {"A": "train"}),
        ("agents", True, {"A": "agents", "B": "serve"}),
        ("agents", False, {"A": "agents"}),
    ],
)
def test_what_starts_servers_hands_them_their_variables(
    role: str, uses_gpus: bool, expected: dict[str, str]
) -> None:
    variables = {"train": {"A": "train"}, "serve": {"A": "serve", "B": "serve"}}
    process = ProcessSpec("x", role, "package.module:run", {}, uses_gpus=uses_gpus)
    assert select_role_variables(process, variables | {"agents": {"A": "agents"}}) == expected

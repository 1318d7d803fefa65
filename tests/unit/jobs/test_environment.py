"""Variables of a job's processes, and the address by which other nodes reach them."""

import socket

import psutil
import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.config import build_role_variables
from areal_hpc.jobs.node import find_interface, find_own_address
from areal_hpc.jobs.task_processes import select_role_variables
from areal_hpc.recipe.loading import load_recipe
from areal_hpc.rundir.jobs import ProcessSpec
from areal_hpc.slurm.scontrol import expand_node_list
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


def test_a_trainer_that_shares_no_node_with_servers_reduces_in_switches() -> None:
    recipe = load_recipe(GPU_RECIPE)
    among_servers = build_role_variables(recipe)
    apart = build_role_variables(recipe, trainer_is_apart=True)
    assert among_servers["train"] == apart["train"] | {"NCCL_NVLS_ENABLE": "0"}
    assert "NCCL_NVLS_ENABLE" not in apart["train"]
    assert (apart["serve"], apart["agents"]) == (among_servers["serve"], among_servers["agents"])


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
def test_servers_get_their_variables(role: str, uses_gpus: bool, expected: dict[str, str]) -> None:
    variables = {"train": {"A": "train"}, "serve": {"A": "serve", "B": "serve"}}
    process = ProcessSpec("x", role, "package.module:run", {}, uses_gpus=uses_gpus)
    assert select_role_variables(process, variables | {"agents": {"A": "agents"}}) == expected


def test_an_address_that_was_given_counts_then_the_sites_interface_then_the_hosts_name() -> None:
    assert find_own_address("no-such-interface", {"AREAL_HPC_HOST": "10.1.2.3"}) == "10.1.2.3"
    (loopback,) = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(entry.address == "127.0.0.1" for entry in addresses)
    )
    assert find_own_address(loopback, {}) == "127.0.0.1"
    assert find_interface("127.0.0.1") == loopback
    socket.create_server((find_own_address("", {}), 0)).close()


def test_a_missing_interface_is_the_sites_mistake_and_lists_what_there_is() -> None:
    with pytest.raises(RecipeError, match=r"no interface ib7 .* it has .*lo") as caught:
        find_own_address("ib7", {})
    assert caught.value.problems[0].key == "cluster.slurm.network.interface"


@pytest.mark.parametrize(
    ("nodelist", "nodes"),
    [
        ("n1", ["n1"]),
        ("n[01-03,07],login", ["n01", "n02", "n03", "n07", "login"]),
        ("rack[1-2]-n[08,10]", ["rack1-n08", "rack1-n10", "rack2-n08", "rack2-n10"]),
    ],
)
def test_slurms_notation_of_nodes_is_read(nodelist: str, nodes: list[str]) -> None:
    assert expand_node_list(nodelist) == nodes

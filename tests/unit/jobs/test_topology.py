"""By which address the other nodes reach this one."""

import socket

import psutil
import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.node import find_interface, find_own_address
from areal_hpc.slurm.scontrol import expand_node_list


def test_an_address_that_was_given_counts_then_the_sites_interface_then_the_hosts_name() -> None:
    assert find_own_address("no-such-interface", {"AREAL_HPC_HOST": "10.1.2.3"}) == "10.1.2.3"
    (loopback,) = (
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address == "127.0.0.1" for one in addresses)
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

"""What a devcluster is made of, decided without touching the machine."""

import re
from dataclasses import replace
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.slurm.devcluster.paths import DevclusterPaths, get_default_root
from areal_hpc.slurm.devcluster.plan import (
    DevclusterPlan,
    DevclusterSettings,
    count_ports,
    dump_plan_inputs,
    parse_plan_inputs,
    plan_devcluster,
)
from tests.golden.make_devcluster import FACTS, GOLDEN, VARIANTS, describe, plan_variant

PATHS = DevclusterPaths(Path("/run/dev"))


def planned(settings: DevclusterSettings) -> DevclusterPlan:
    return plan_devcluster(settings, FACTS, PATHS)


@pytest.mark.parametrize("name", VARIANTS)
def test_files_and_processes_are_the_golden_ones(name: str) -> None:
    # After a change that is meant: python -m tests.golden.make_devcluster
    assert describe(plan_variant(VARIANTS[name])) == (GOLDEN / f"{name}.txt").read_text()


def test_nodes_in_namespaces_differ_in_name_and_address_and_share_the_port() -> None:
    facts = replace(FACTS, network=255)
    nodes = plan_devcluster(DevclusterSettings(nodes=200), facts, PATHS).nodes
    assert [nodes[0].name, nodes[-1].name] == ["n01", "n200"]
    assert len({node.address for node in nodes}) == 200
    assert {node.port for node in nodes} == {6818}
    assert max(len(node.link) for node in nodes) <= 15, "Linux takes no longer name of a cable"


def test_nodes_on_loopback_take_the_free_ports_after_the_controllers() -> None:
    settings = DevclusterSettings(nodes=3, namespaces=False)
    made = planned(settings)
    assert [node.port for node in made.nodes] == [20002, 20003, 20004]
    assert count_ports(settings) == 5
    assert made.bridge == ""


def test_all_nodes_together_claim_no_more_memory_than_there_is() -> None:
    made = planned(DevclusterSettings(nodes=7))
    claimed_mib = re.search(r"RealMemory=(\d+)", made.files[PATHS.slurm_conf])
    assert claimed_mib
    assert 7 * int(claimed_mib[1]) <= FACTS.memory_mib < 7 * (int(claimed_mib[1]) + 1)


@pytest.mark.parametrize("namespaces", [True, False])
def test_without_accounting_only_the_database_is_missing(namespaces: bool) -> None:
    with_it = plan_variant(DevclusterSettings(namespaces=namespaces))
    made = plan_variant(DevclusterSettings(namespaces=namespaces, accounting=False))
    assert [daemon.name for daemon in made.daemons] == ["munged", "slurmctld"]
    assert "slurmdbd" not in "".join(made.files.values())
    whole, less = describe(with_it).splitlines(), describe(made).splitlines()
    assert [line for line in ndiff(whole, less) if line.startswith("+")] == []


def test_everything_lies_below_the_state_directory() -> None:
    made = planned(DevclusterSettings())
    assert all(path.is_relative_to(PATHS.root) for path in made.files)
    named = re.findall(r"=(/[^\s,]+)", "\n".join(made.files.values()))
    assert {path for path in named if not path.startswith("/run/dev/")} == {"/bin/true"}


def test_the_same_plan_is_made_from_what_is_kept() -> None:
    settings = DevclusterSettings(nodes=2, grace_s=3, accounting=False)
    assert parse_plan_inputs(dump_plan_inputs(settings, FACTS)) == (settings, FACTS)


@pytest.mark.parametrize(
    ("key", "value"), [("nodes", 0), ("nodes", 201), ("gpus_per_node", 0), ("grace_s", -1)]
)
def test_a_setting_out_of_range_is_refused_by_name(key: str, value: int) -> None:
    setting: dict[str, Any] = {key: value}
    with pytest.raises(RecipeError, match=f"--{key.replace('_', '-')}"):
        DevclusterSettings(**setting)


def test_a_directory_too_deep_for_sockets_is_refused() -> None:
    with pytest.raises(RecipeError, match="at most 107 bytes"):
        plan_devcluster(DevclusterSettings(), FACTS, DevclusterPaths(Path("/" + "d" * 100)))


def test_a_machine_too_small_for_its_nodes_is_refused() -> None:
    with pytest.raises(RecipeError, match="ask for fewer nodes"):
        plan_devcluster(DevclusterSettings(nodes=200), replace(FACTS, memory_mib=2000), PATHS)


def test_the_state_is_kept_where_the_session_keeps_its_files() -> None:
    assert get_default_root(7, "/run/user/7") == Path("/run/user/7/areal-hpc-devcluster")
    assert get_default_root(7, None) == Path("/tmp/areal-hpc-devcluster-7")

"""Plan of a devcluster, decided without touching the machine."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from slurm.devcluster.paths import DevclusterPaths
from slurm.devcluster.plan import DevclusterPlan, DevclusterSettings, HostFacts, plan_devcluster

PATHS = DevclusterPaths(Path("/run/dev"))
FACTS = HostFacts(
    hostname="login", user="ada", memory_mib=24000, first_port=20000, network=3, limits_memory=True
)


def planned(settings: DevclusterSettings) -> DevclusterPlan:
    return plan_devcluster(settings, FACTS, PATHS)


def test_all_nodes_together_claim_no_more_memory_than_there_is() -> None:
    made = planned(DevclusterSettings(nodes=7))
    claimed_mib = re.search(r"RealMemory=(\d+)", made.files[PATHS.slurm_conf])
    assert claimed_mib
    assert 7 * int(claimed_mib[1]) <= FACTS.memory_mib < 7 * (int(claimed_mib[1]) + 1)


def test_everything_lies_below_the_state_directory() -> None:
    made = planned(DevclusterSettings())
    assert all(path.is_relative_to(PATHS.root) for path in made.files)
    named = re.findall(r"=(/[^\s,]+)", "\n".join(made.files.values()))
    assert {path for path in named if not path.startswith("/run/dev/")} == {"/bin/true"}


@pytest.mark.parametrize(
    ("key", "value"), [("nodes", 0), ("nodes", 201), ("gpus_per_node", 0), ("grace_s", -1)]
)
def test_a_setting_out_of_range_is_refused_by_name(key: str, value: int) -> None:
    setting: dict[str, Any] = {key: value}
    with pytest.raises(RecipeError, match=f"--{key.replace('_', '-')}"):
        DevclusterSettings(**setting)


def test_a_machine_too_small_for_its_nodes_is_refused() -> None:
    with pytest.raises(RecipeError, match="ask for fewer nodes"):
        plan_devcluster(DevclusterSettings(nodes=200), replace(FACTS, memory_mib=2000), PATHS)

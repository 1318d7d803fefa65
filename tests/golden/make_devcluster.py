"""Writes tests/golden/devcluster/: python -m tests.golden.make_devcluster."""

import sys
from dataclasses import replace
from pathlib import Path

from areal_hpc.slurm.devcluster import node_main
from areal_hpc.slurm.devcluster.paths import DevclusterPaths
from areal_hpc.slurm.devcluster.plan import (
    Daemon,
    DevclusterNode,
    DevclusterPlan,
    DevclusterSettings,
    HostFacts,
    plan_devcluster,
)

GOLDEN = Path(__file__).with_name("devcluster")

FACTS = HostFacts(
    hostname="login", user="ada", memory_mib=24000, first_port=20000, network=3, limits_memory=True
)

VARIANTS = {"namespaces": DevclusterSettings(), "loopback": DevclusterSettings(namespaces=False)}


def plan_variant(settings: DevclusterSettings) -> DevclusterPlan:
    """Four nodes on a machine of 24 GB. On loopback memory is not limited."""
    facts = FACTS if settings.namespaces else replace(FACTS, network=0, limits_memory=False)
    return plan_devcluster(settings, facts, DevclusterPaths(Path("/run/dev")))


def describe(made: DevclusterPlan) -> str:
    """Every file and every process, without what differs between checkouts."""
    parts = [f"==> {path} <==\n{text}" for path, text in made.files.items()]
    commands: list[Daemon | DevclusterNode] = [*made.daemons, *made.nodes]
    lines = [f"{part.name}: {' '.join(part.command)}" for part in commands]
    shown = (
        "\n".join(lines)
        .replace(sys.executable, "PYTHON")
        .replace(node_main.__file__, "node_main.py")
    )
    environ = "\n".join(f"{key}={value}" for key, value in made.environ.items())
    return "\n".join([*parts, f"==> environment <==\n{environ}\n", f"==> processes <==\n{shown}\n"])


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, settings in VARIANTS.items():
        (GOLDEN / f"{name}.txt").write_text(describe(plan_variant(settings)))

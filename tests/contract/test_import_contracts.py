"""The contracts of .importlinter hold, and each of them can fail."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.environments import CHECKOUT

LAYERS = "Layers: actors meet only in media, and every module has a layer"
ACYCLIC = "No package or module cycles, at any depth"
SUBMITIT = "Only areal_hpc.cluster.submit imports submitit"
PLANNING = "Planning runs on a login node: no torch, Megatron or SGLang"
AGENTS = "What runs in the agents environment never imports torch"


@dataclass(frozen=True)
class Mutation:
    """Lines appended to modules of a copy of the package, and the contracts they must break."""

    name: str
    appended: dict[str, str]
    breaks: frozenset[str]


def mutation(name: str, appended: dict[str, str], *breaks: str) -> Mutation:
    return Mutation(name, appended, frozenset(breaks))


MUTATIONS = [
    mutation(
        "an actor imports an actor",
        {"rollout/config.py": "import areal_hpc.proxy.config"},
        LAYERS,
    ),
    mutation(
        "an actor imports the client",
        {"rollout/config.py": "import areal_hpc.client.engine"},
        LAYERS,
    ),
    mutation(
        "a trainer imports its ledger",
        {"trainer/config.py": "import areal_hpc.ledger"},
        LAYERS,
    ),
    mutation(
        "a medium imports an actor",
        {"shards/config.py": "import areal_hpc.trainer.config"},
        LAYERS,
        ACYCLIC,
    ),
    mutation(
        "a medium imports a medium",
        {"session/__init__.py": "import areal_hpc.wire.proxy"},
        LAYERS,
    ),
    mutation(
        "an actor sees the whole recipe",
        {"inference/__init__.py": "import areal_hpc.recipe"},
        LAYERS,
        ACYCLIC,
    ),
    mutation(
        "the base knows a medium",
        {"layout.py": "import areal_hpc.weights.version"},
        LAYERS,
    ),
    mutation(
        "a module without a layer appears",
        {"odds.py": '"""Odds and ends."""'},
        LAYERS,
    ),
    mutation(
        "a package without a layer appears",
        {"later/__init__.py": '"""Later."""'},
        LAYERS,
    ),
    mutation(
        "two modules of one package import each other",
        {
            "weights/config.py": "import areal_hpc.weights.version",
            "weights/version.py": "import areal_hpc.weights.config",
        },
        ACYCLIC,
    ),
    mutation(
        "a second file imports submitit",
        {"cluster/jobspec.py": "import submitit"},
        SUBMITIT,
    ),
    mutation(
        "an actor imports submitit",
        {"trainer/config.py": "import submitit"},
        SUBMITIT,
    ),
    mutation(
        "a function of the planner imports torch",
        {"launch/plan.py": "def _late() -> None:\n    import torch"},
        PLANNING,
    ),
    mutation(
        "the recipe reaches Megatron through a stage's configuration",
        {"trainer/config.py": "import megatron.core"},
        PLANNING,
    ),
    mutation(
        "the recipe reaches SGLang through a stage's configuration",
        {"inference/config.py": "from sglang import Engine"},
        PLANNING,
    ),
    mutation(
        "the wire imports torch",
        {"wire/replicas.py": "import torch"},
        AGENTS,
    ),
    mutation(
        "the proxy reaches torch through a medium",
        {
            "weights/__init__.py": "import torch",
            "proxy/config.py": "import areal_hpc.weights",
        },
        AGENTS,
        PLANNING,
    ),
]


def broken_contracts(tree: Path) -> frozenset[str]:
    """Lint the package in `tree` (not the installed one) and name the contracts it breaks."""
    linter = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run(
        [linter, "--no-cache"], cwd=tree, capture_output=True, text=True, check=False
    )
    tally = re.search(r"Contracts: (\d+) kept, (\d+) broken", run.stdout)
    assert tally, run.stdout + run.stderr
    broken = frozenset(re.findall(r"^(.+) BROKEN", run.stdout, flags=re.MULTILINE))
    assert len(broken) == int(tally[2])
    assert (run.returncode == 0) == (not broken)
    return broken


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the package and its contracts."""
    shutil.copytree(
        CHECKOUT / "areal_hpc",
        tmp_path / "areal_hpc",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    shutil.copy(CHECKOUT / ".importlinter", tmp_path)
    return tmp_path


def test_the_package_keeps_every_contract(tree: Path) -> None:
    assert broken_contracts(tree) == frozenset()


@pytest.mark.parametrize("case", MUTATIONS, ids=lambda case: case.name)
def test_each_contract_breaks_when_it_is_violated(tree: Path, case: Mutation) -> None:
    for name, lines in case.appended.items():
        path = tree / "areal_hpc" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as module:
            module.write(f"\n{lines}\n")
    assert broken_contracts(tree) == case.breaks


def test_every_contract_has_a_mutation_that_breaks_it() -> None:
    declared = set(re.findall(r"^name = (.+)$", (CHECKOUT / ".importlinter").read_text(), re.M))
    assert declared == {contract for case in MUTATIONS for contract in case.breaks}

"""Each of the contracts of .importlinter can fail; `make check` says whether one does."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import run_program
from tests.support.environments import CHECKOUT

OFFENSES = [
    # what is appended to which module, and how the report shows it (line numbers left out)
    # An actor imports an actor, the client, its ledger, the launcher.
    ("rollout/config.py", "import areal_hpc.proxy.config", "rollout.config -> {}.proxy.config"),
    (
        "rollout/config.py",
        "import areal_hpc.client.in_process_engine",
        "rollout.config -> {}.client.in_process_engine",
    ),
    ("trainer/config.py", "import areal_hpc.ledger", "trainer.config -> {}.ledger"),
    ("inference/__init__.py", "import areal_hpc.launch.plan", "inference -> {}.launch.plan"),
    # A medium imports an actor, a medium; the run directory knows who writes it.
    ("shards/schema.py", "import areal_hpc.trainer.config", "shards.schema -> {}.trainer.config"),
    ("session/__init__.py", "import areal_hpc.shards.schema", "session -> {}.shards.schema"),
    ("rundir/paths.py", "import areal_hpc.recipe.base", "rundir.paths -> {}.recipe.base"),
    # What asks Slurm knows the processes of a job.
    (
        "slurm/states.py",
        "import areal_hpc.jobs.node.topology",
        "slurm.states -> {}.jobs.node.topology",
    ),
    # A module and a package without a layer appear.
    ("odds.py", '"""Odds and ends."""', "- {}.odds"),
    ("later/__init__.py", '"""Later."""', "- {}.later"),
    # Two modules of one package import each other.
    (
        "weights/discovery.py",
        "import areal_hpc.weights.publisher",
        "cycles are allowed in {}.weights",
    ),
    # A second file and an actor import submitit.
    ("slurm/batch_script/script.py", "import submitit", "slurm.batch_script.script -> submitit"),
    ("trainer/config.py", "import submitit", "trainer.config -> submitit"),
    # A function of the planner imports torch; the recipe reaches Megatron and SGLang by a section.
    ("launch/plan.py", "def _late() -> None:\n    import torch", "launch.plan -> torch"),
    (
        "recipe/sections/trainer.py",
        "import megatron.core",
        "{}.recipe is not allowed to import megatron",
    ),
    (
        "recipe/sections/inference.py",
        "from sglang import Engine",
        "recipe is not allowed to import sglang",
    ),
    # The wire imports torch, and the proxy reaches it through a medium.
    ("wire/replicas.py", "import torch", "{}.wire is not allowed to import torch"),
    ("weights/__init__.py", "import torch", "weights -> torch"),
    ("proxy/config.py", "import areal_hpc.weights", "{}.proxy is not allowed to import torch"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Output of the linter for a copy of the package that holds every offense."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CHECKOUT / "areal_hpc", tree / "areal_hpc", ignore=ignored)
    shutil.copy(CHECKOUT / ".importlinter", tree)
    for name, lines, _ in OFFENSES:
        path = tree / "areal_hpc" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as module:
            module.write(f"\n{lines}\n")
    linter = Path(sys.executable).with_name("lint-imports")
    said = run_program(linter, "--no-cache", folder=tree)
    assert said.returncode == 1, said.stdout + said.stderr
    return re.sub(r" \(l\.\d+\)", "", said.stdout)


@pytest.mark.parametrize(
    ("name", "lines", "shown"), OFFENSES, ids=[f"{one[0]}: {one[1]}" for one in OFFENSES]
)
def test_an_offense_is_reported(name: str, lines: str, shown: str, report: str) -> None:
    assert re.search(re.escape(shown.replace("{}", "areal_hpc")) + r"\b", report), (name, lines)


def test_every_contract_breaks_when_it_is_violated(report: str) -> None:
    declared = re.findall(r"^name = (.+)$", (CHECKOUT / ".importlinter").read_text(), re.M)
    assert re.findall(r"^(.+) BROKEN", report, re.M) == declared

"""Each of the contracts of .importlinter can fail; `make check` says whether one does."""

import re
import shutil
import sys
from pathlib import Path

from tests.support.commands import run_program
from tests.support.environments import CHECKOUT

OFFENSES = {
    "rollout/config.py": "import areal_hpc.proxy.config",  # an actor imports an actor
    "rundir/paths.py": "import areal_hpc.recipe.base",  # a medium knows who writes it
    "odds.py": '"""A module without a layer."""',
    "weights/replicas.py": "import areal_hpc.weights.publisher",  # which imports it
    "slurm/batch_script.py": "import submitit",
    "launch/plan.py": "def _late() -> None:\n    import torch",
    "recipe/sections/inference.py": "from sglang import Engine",
    "wire/replicas.py": "import torch",
}


def test_every_contract_breaks_when_it_is_violated(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(CHECKOUT / "areal_hpc", tmp_path / "areal_hpc", ignore=ignored)
    shutil.copy(CHECKOUT / ".importlinter", tmp_path)
    for name, lines in OFFENSES.items():
        with (tmp_path / "areal_hpc" / name).open("a") as module:
            module.write(f"\n{lines}\n")
    linter = Path(sys.executable).with_name("lint-imports")
    said = run_program(linter, "--no-cache", folder=tmp_path)
    assert said.returncode == 1, said.stdout + said.stderr
    declared = re.findall(r"^name = (.+)$", (CHECKOUT / ".importlinter").read_text(), re.M)
    assert re.findall(r"^(.+) BROKEN", said.stdout, re.M) == declared
    for name in OFFENSES:
        assert f".{Path(name).stem}" in said.stdout, name

"""Each contract of .importlinter can fail, and the code keeps habits that ruff cannot check."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.commands import run_program
from tests.support.environments import CHECKOUT, sources

OFFENSES = {
    "rollout/config.py": "import areal_hpc.proxy.config",  # an actor imports an actor
    "rundir/paths.py": "import areal_hpc.recipe.base",  # a medium imports its writer
    "odds.py": '"""A module without a layer."""',
    "weights/replicas.py": "import areal_hpc.weights.publisher",  # this module imports it
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
    result = run_program(linter, "--no-cache", folder=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    declared = re.findall(r"^name = (.+)$", (CHECKOUT / ".importlinter").read_text(), re.M)
    assert re.findall(r"^(.+) BROKEN", result.stdout, re.M) == declared
    for name in OFFENSES:
        assert f".{Path(name).stem}" in result.stdout, name


BROAD_EXCEPT = re.compile(r"^\s*except\b(?:.*\b(?:Base)?Exception\b|\*?\s*:)")


def broad_excepts_without_a_reason(text: str) -> Iterator[int]:
    for number, line in enumerate(text.splitlines(), 1):
        if BROAD_EXCEPT.match(line) and not re.search(r"# boundary: \w+", line):
            yield number


UNPICKLES = re.compile(
    r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b"
    r"|\btorch\.load\((?!.*weights_only=True)",
    re.MULTILINE,
)


def test_a_broad_except_says_why() -> None:
    broad_handlers = [
        (module, line)
        for module, text in sources().items()
        for line in broad_excepts_without_a_reason(text)
    ]
    assert broad_handlers == []


def test_nothing_is_unpickled() -> None:
    """Only agents that a script handed over from the run's own directory are unpickled, and calls.

    A worker process takes these from the process that started it, and answers with JSON.
    """
    modules = [module for module, text in sources().items() if UNPICKLES.search(text)]
    assert modules == ["rollout/execution/agent_pickle.py", "rollout/execution/process_pool.py"]


def test_no_archive_is_extracted_by_tarfile() -> None:
    """One writer unpacks archives, and no other module of the library does."""
    extracts = re.compile(r"\.extract(?:all)?\(|\bunpack_archive\(|[\"'](?:tar|unzip)[\"'],")
    modules = [module for module, text in sources().items() if extracts.search(text)]
    assert modules == []

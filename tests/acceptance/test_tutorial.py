"""docs/tutorial.md, followed to the letter from the set-up on."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.run_view import RunView
from tests.support.commands import run_program, said_by
from tests.support.environments import CHECKOUT, python_of

DOCUMENT = (CHECKOUT / "docs" / "tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.mark.timeout(900)
def test_a_newcomer_trains_an_agent_of_their_own(tmp_path: Path) -> None:
    (agent, broken_agent), (recipe,) = blocks("python"), blocks("yaml")
    (tmp_path / "my_agent.py").write_text(agent)
    (tmp_path / "broken_agent.py").write_text(broken_agent)
    (tmp_path / "my_recipe.yaml").write_text(recipe)
    set_up, *commands = blocks("bash")
    assert "make setup" in set_up
    path = f"{python_of('agents').parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    for command in commands:
        if "BrokenAgent" in command:
            expect_the_mistake_to_be_named(command.splitlines(), tmp_path, environ)
            continue
        shell = ("bash", "-ec", command)
        said_by(run_program(*shell, folder=tmp_path, environ=environ, timeout_s=None))
    evaluations = RunView(RunPaths(tmp_path / "runs" / "tutorial" / "first")).evaluations
    assert evaluations[0][1] <= 0.3
    assert evaluations[-1][1] >= 0.9


def expect_the_mistake_to_be_named(
    lines: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> None:
    """The agent's trial, a run of it and `why` name line and error, and exit as documented."""
    for line, exit_code in zip(lines, (70, 70, 1), strict=True):
        answer = run_program(*line.split(), folder=folder, environ=environ, timeout_s=200)
        said = answer.stdout + answer.stderr
        assert answer.returncode == exit_code, said
        assert re.search(r"broken_agent\.py\D+17", said), said
        assert "'list' object has no attribute 'message'" in said

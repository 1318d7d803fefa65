"""Paths that a container program's command line cannot name are refused before it runs."""

import asyncio
from pathlib import Path

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.sandbox.runtimes import make_runtime
from areal_hpc.sandbox.spec import SandboxSpec
from tests.support.commands import write_program


@pytest.mark.parametrize(
    ("isolation", "name"), [("podman", "a:ro"), ("apptainer", "a:ro"), ("apptainer", "a,b")]
)
def test_a_folder_whose_path_would_be_split_is_refused_by_name(
    isolation: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("podman", "crun", "apptainer"):
        write_program(tmp_path / program, "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    folder = tmp_path / name
    folder.mkdir()
    spec = SandboxSpec(readonly_folders=(str(folder),))
    with pytest.raises(RecipeError) as refused:
        asyncio.run(make_runtime(isolation).start(spec))
    (problem,) = refused.value.problems
    assert f"cannot show {folder}: expected a path without" in problem.message
    assert problem.key == "rollout.agent.isolation"

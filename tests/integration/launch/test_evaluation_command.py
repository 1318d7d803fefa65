"""`areal-hpc eval`: what it cannot do is said before anything starts."""

from pathlib import Path

import pytest

from tests.support.commands import areal_hpc

pytestmark = pytest.mark.timeout(400)


@pytest.mark.thorough
def test_what_cannot_be_evaluated_is_said_before_anything_starts(tmp_path: Path) -> None:
    nothing = areal_hpc("eval", tmp_path)
    assert nothing.returncode == 78
    assert f"there is no run and no model at {tmp_path}" in nothing.stderr
    (tmp_path / "config.json").write_text("{}")
    without = areal_hpc("eval", tmp_path)
    assert without.returncode == 78
    assert "--recipe" in without.stderr
    recipe = ("--recipe", "recipes/quickstart.yaml", f"cluster.fileroot={tmp_path / 'runs'}")
    arguments = ("eval", tmp_path, *recipe)
    unknown = areal_hpc(*arguments, "--set", "aime")
    assert unknown.returncode == 78
    assert "choose from valid, longer, sampled" in unknown.stderr
    alone = areal_hpc(*arguments, "--wait")
    assert "add --submit" in alone.stderr
    assert not (tmp_path / "runs").exists()

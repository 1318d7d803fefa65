"""What AReaL's users are told is what the code does."""

from pathlib import Path

import pytest

from areal_hpc.cli.main import main

FOLDER = Path(__file__).parent


def migrated(*arguments: object) -> int:
    """The exit code of `areal-hpc migrate`."""
    with pytest.raises(SystemExit) as ended:
        main(["migrate", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_file_becomes_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recipe.yaml"
    assert migrated(FOLDER / "areal_config.yaml", "--rows", "1000", "--out", out) == 0
    assert "workflow: areal_hpc.areal.workflow.openai.math_agent.MathAgent" in out.read_text()
    assert "total_steps: 30" in out.read_text()
    said = capsys.readouterr().out
    assert "#   actor.adv_norm.mean_level: batch\n#     advantages" in said
    assert "Before it can run" not in said


def test_foreign_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "other.yaml"
    config.write_text("model: {path: /m}\n")
    assert migrated(config) == 78
    assert "this is not an AReaL configuration" in capsys.readouterr().err


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert migrated(tmp_path / "none.yaml") == 78

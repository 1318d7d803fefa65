"""What AReaL's users are told is what the code does."""

import re
from pathlib import Path

import pytest

from areal_hpc.areal.config.rules import RULE_BY_KEY
from areal_hpc.cli.main import main
from areal_hpc.recipe.base import get_section_class
from areal_hpc.recipe.recipe import Recipe

FOLDER = Path(__file__).parent


def test_every_key_of_a_recipe_that_a_rule_names_exists() -> None:
    sections = {"cluster", "evaluation", "inference", "model", "proxy", "rollout", "trainer"}
    for rule in RULE_BY_KEY.values():
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", rule.counterpart):
            if name.split(".")[0] not in sections or name.endswith((".jsonl", ".yaml")):
                continue
            if name in RULE_BY_KEY and "as `" in rule.counterpart:
                continue  # another key of AReaL's
            assert is_a_key(name) or name in RULE_BY_KEY, (rule.key, name)


def is_a_key(name: str) -> bool:
    model: type = Recipe
    *sections, last = name.split(".")
    for section in sections:
        field = model.model_fields.get(section)  # type: ignore[attr-defined]
        found = field and get_section_class(field.annotation)
        if not found:
            return bool(field) and section == sections[-1]  # a free mapping
        model = found
    return last in model.model_fields  # type: ignore[attr-defined]


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

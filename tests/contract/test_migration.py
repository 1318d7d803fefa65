"""What AReaL's users are told is what the code does."""

from pathlib import Path

import pytest
import yaml

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


def test_gsm8k_on_the_hub_and_what_a_recipe_still_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "gsm8k.yaml"
    config.write_text(
        "{experiment_name: e, trial_name: t, actor: {path: Qwen/Qwen3-0.6B}, total_train_epochs: 1,"
        " train_dataset: {path: openai/gsm8k, batch_size: 8}, valid_dataset: {path: a/b}}"
    )
    assert migrated(config, "--rows", "80") == 0
    text, lacks = capsys.readouterr().out.split("# No counterpart:")
    assert yaml.safe_load(text)["train_dataset"] == {
        "hub": "openai/gsm8k/main/train-*.parquet",
        "to_task": "areal_hpc.dataset.adapters:convert_gsm8k",
    }
    assert "set valid_dataset.hub=a/b/FILES" in lacks
    assert "rollout.workflow: this key is required" in lacks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: {path: /m}", "this is not an AReaL configuration"),
        ("{rollout: {n_samples: 4}, trainer: {}}", "this is a recipe"),
    ],
)
def test_other_files_are_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "other.yaml"
    config.write_text(text)
    assert migrated(config) == 78
    assert said in capsys.readouterr().err


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert migrated(tmp_path / "none.yaml") == 78

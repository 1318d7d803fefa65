"""Supervised fine-tuning alone: of a recipe without tasks, and of any recipe that has the stage."""

from pathlib import Path
from typing import Any

import pytest

from areal_hpc.cli.main import main
from areal_hpc.errors import RecipeError
from areal_hpc.launch.evaluation import find_target
from areal_hpc.launch.plan import plan_run
from areal_hpc.launch.prepare import (
    check_finished_recipe,
    check_recipe_changes,
    is_run_finished,
    write_run_recipe,
)
from areal_hpc.recipe.loading import build_recipe, load_recipe
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.view.state.run_view import RunView
from areal_hpc.view.state.summary import summarize_run
from tests.support.environments import CHECKOUT

QUICKSTART = CHECKOUT / "recipes" / "quickstart.yaml"
DEMONSTRATIONS = {"path": "demonstrations.jsonl"}
LEAST: dict[str, Any] = {
    "experiment_name": "chat",
    "trial_name": "first",
    "cluster": {"fileroot": "runs"},
    "model": {"path": "model"},
    "sft": {"dataset": DEMONSTRATIONS, "total_steps": 10},
}
"""A recipe that says nothing of reinforcement learning."""


def list_stages(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as end:
        main(["plan", *words])
    assert end.value.code == 0
    out = capsys.readouterr().out
    return [line.split()[1].rstrip(":") for line in out.splitlines() if line.startswith("stage")]


def test_the_stage_of_any_recipe_is_run_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_stages(str(QUICKSTART), capsys=capsys) == ["sft", "train"]
    assert list_stages("sft", str(QUICKSTART), "seed=2", capsys=capsys) == ["sft"]


def test_a_recipe_needs_no_key_of_reinforcement_learning() -> None:
    held_out = {"dataset": DEMONSTRATIONS, "every_steps": 5}
    recipe = build_recipe({**LEAST, "sft": {**LEAST["sft"], "evaluation": held_out}})
    paths = RunPaths(Path("/run"))
    (stage,) = plan_run(recipe, paths)
    (process,) = stage.leader.processes
    assert stage.done_marker == paths.finished_marker
    assert process.config["dataset_path"] == "/run/data/sft.jsonl"
    assert process.config["evaluation_path"] == "/run/data/sft_evaluation.jsonl"
    assert [key for _, key in recipe.task_sets_with_keys] == [
        "sft.dataset",
        "sft.evaluation.dataset",
    ]


def test_a_recipe_that_trains_nothing_is_refused() -> None:
    recipe = load_recipe(QUICKSTART, ["model={path: model, tiny: null}", "sft=null"])
    alone = recipe.model_copy(update={"train_dataset": None})
    with pytest.raises(RecipeError, match="neither training tasks nor demonstrations"):
        plan_run(alone, RunPaths(Path("/run")))


def test_an_adapter_divides_as_networks_of_transformers_do() -> None:
    keys = ["sft.lora={rank: 4}", "trainer.parallel.shard_parameters=true"]
    with pytest.raises(RecipeError, match=r"sft\.lora and trainer\.parallel\.shard_parameters"):
        load_recipe(QUICKSTART, keys)


def test_a_finished_stage_is_judged_and_goes_on_with_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fileroot = f"cluster.fileroot={tmp_path}"
    alone = load_recipe(QUICKSTART, [fileroot, "train_dataset=null"])
    paths = RunPaths(alone.run_dir)
    paths.root.mkdir(parents=True)
    write_run_recipe(alone, paths.recipe)
    for step, loss in ((1, 3.0), (2, 0.5)):
        append_line(paths.sft_metrics, {"step": step, "loss": loss, "eval/loss": loss / 2})
    view = RunView(paths)
    assert (view.step, view.total_steps) == (2, 1200)
    assert not is_run_finished(alone, paths)
    paths.finished_marker.touch()
    paths.sft_export.mkdir(parents=True)
    assert is_run_finished(alone, paths)
    with pytest.raises(RecipeError, match=r"trained with sft\.total_steps=1200") as refused:
        check_finished_recipe(
            load_recipe(QUICKSTART, [fileroot, "train_dataset=null", "sft.total_steps=2000"]), paths
        )
    hint = refused.value.problems[0].hint
    assert hint == "use another trial_name, or --fresh to start over"
    assert f"areal-hpc eval {paths.root} " in summarize_run(view, "areal-hpc")
    monkeypatch.chdir(tmp_path)
    text = summarize_run(view, "areal-hpc")
    assert "SFT loss          3.0000 -> 0.5000" in text
    assert "held-out loss     1.5000 -> 0.2500" in text
    assert "areal-hpc eval quickstart/demo " in text
    assert str(tmp_path) not in text

    target = find_target(paths.root, step=None, recipe=None)
    assert (target.step, target.model) == (0, paths.sft_export)

    whole = load_recipe(QUICKSTART, [fileroot])
    assert not is_run_finished(whole, paths)
    lines: list[str] = []
    check_recipe_changes(whole, paths, lines.append)
    assert {line.split()[1].split(".")[0].rstrip(":") for line in lines} == {"train_dataset"}
    write_run_recipe(whole, paths.recipe)
    with pytest.raises(RecipeError, match=r"train_dataset\.generator cannot change"):
        check_recipe_changes(alone, paths, lines.append)

"""Runs side by side."""

from pathlib import Path

import yaml

from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.paths import RunPaths, list_runs
from areal_hpc.rundir.run_recipe import PRIVATE_RECIPE_PLACEHOLDER
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.state.summary import compare_runs, label_differing_keys


def test_only_keys_that_differ_are_columns_by_their_shortest_name() -> None:
    recipes = [
        {"trial_name": "a", "trainer": {"lr": 1e-3, "seed": 1}, "proxy": {"seed": 1}},
        {"trial_name": "b", "trainer": {"lr": 2e-3, "seed": 1}, "proxy": {"seed": 2}},
    ]
    assert label_differing_keys(recipes) == [("proxy.seed", "seed"), ("trainer.lr", "lr")]
    assert label_differing_keys(recipes[:1]) == []
    alike = [{"a": {"lr": 1}, "b": {"lr": 1}}, {"a": {"lr": 2}, "b": {"lr": 2}}]
    assert [short for _, short in label_differing_keys(alike)] == ["a.lr", "b.lr"]


def test_a_recipe_of_another_user_makes_no_key_differ() -> None:
    """Its keys are not to be read: every key of the others would be a column."""
    recipes = [{"trainer": {"lr": 1e-3, "seed": 1}}, PRIVATE_RECIPE_PLACEHOLDER]
    assert label_differing_keys(recipes) == []
    recipes.append({"trainer": {"lr": 2e-3, "seed": 1}})
    assert label_differing_keys(recipes) == [("trainer.lr", "lr")]


def make_run(root: Path, trial: str, lr: float) -> RunPaths:
    paths = RunPaths(root / "exp" / trial)
    paths.root.mkdir(parents=True)
    paths.recipe.write_text(
        yaml.safe_dump(
            {"trial_name": trial, "trainer": {"total_steps": 5, "optimizer": {"lr": lr}}}
        )
    )
    append_line(paths.metrics, {"step": 2, "reward/mean": 0.5, "eval/reward": lr})
    return paths


def test_a_sweep_is_a_table(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 0.25)
    make_run(tmp_path, "b", 0.75).finished_marker.touch()
    rows = [line.split() for line in compare_runs(list_runs(tmp_path), QueuePoller())]
    assert rows == [
        ["run", "state", "step", "reward", "held-out", "lr"],
        ["exp/a", "stopped", "2/5", "0.500", "0.250", "0.25"],
        ["exp/b", "finished", "2/5", "0.500", "0.750", "0.75"],
    ]
    assert len(list_runs(tmp_path / "exp")) == 2
    assert len(list_runs(tmp_path / "exp" / "a")) == 1
    assert list_runs(tmp_path / "nowhere") == []


def test_a_run_whose_jobs_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path, "a", 0.5).submissions.mkdir(parents=True)
    make_run(tmp_path, "b", 0.5)
    head, first, second, *notes = compare_runs(list_runs(tmp_path), QueuePoller())
    assert [first.split()[:2], second.split()[:2]] == [
        ["exp/a", "unreadable"],
        ["exp/b", "stopped"],
    ]
    assert len(notes) == 1
    assert notes[0].startswith(f"state unreadable: {tmp_path / 'exp' / 'a'}: ")
    assert head.split() == ["run", "state", "step", "reward", "held-out"]


def test_values_that_may_be_secrets_are_compared_and_not_shown(tmp_path: Path) -> None:
    for trial, secret in (("a", "sk-1"), ("b", "sk-2")):
        paths = make_run(tmp_path, trial, 0.5)
        recipe = yaml.safe_load(paths.recipe.read_text())
        recipe["cluster"] = {"agents": {"variables": {"API_KEY": secret}}}
        recipe["rollout"] = {"workflow_kwargs": {"token": secret}}
        paths.recipe.write_text(yaml.safe_dump(recipe))
    table = "\n".join(compare_runs(list_runs(tmp_path), QueuePoller()))
    assert "API_KEY" in table
    assert "token" in table
    assert table.count("(in recipe.yaml)") == 4
    assert "sk-" not in table


def test_of_unlike_runs_the_usual_keys_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    for trial, value in (("a", 1), ("b", 2)):
        paths = make_run(tmp_path, trial, value)
        recipe = yaml.safe_load(paths.recipe.read_text())
        recipe["alerts"] = {f"bound_{at}": value for at in range(9)}
        recipe["rollout"] = {"n_samples": value, "workflow": f"{trial}." * 50}
        paths.recipe.write_text(yaml.safe_dump(recipe))
    runs = list_runs(tmp_path)
    head, first, _, note = compare_runs(runs, QueuePoller())
    assert head.split()[5:8] == ["lr", "n_samples", "workflow"]
    assert len(head.split()) == 5 + 6
    assert len(first) < 160
    assert note == "6 more recipe keys differ: --all"
    head, *_ = compare_runs(runs, QueuePoller(), shows_all_keys=True)
    assert len(head.split()) == 5 + 12

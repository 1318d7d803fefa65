"""Comparison of runs, and of evaluations of their steps."""

import json
from pathlib import Path

import msgspec
import pytest
import yaml

from areal_hpc.errors import RecipeError
from areal_hpc.evaluation.set_metrics import SetSamples, estimate_metrics
from areal_hpc.rundir.jsonl import append_line
from areal_hpc.rundir.manifests import EvaluationResult, write_evaluation
from areal_hpc.rundir.paths import RunPaths, list_runs
from areal_hpc.rundir.run_inputs import PRIVATE_RECIPE_PLACEHOLDER
from areal_hpc.slurm.queue import QueuePoller
from areal_hpc.view.evaluation_report import (
    EvaluatedSet,
    EvaluationReport,
    WrittenEstimate,
    build_step_report,
    compare_reports,
    format_comparison,
    format_report,
    list_uncompared_metrics,
    read_report,
    write_evaluation_report,
)
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
    """An unreadable recipe would make a column of every key of the others."""
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
        source = {"path": "a", "workflow_kwargs": {"key": secret}}
        recipe["train_dataset"] = {"sources": [source, {"path": "b"}]}
        paths.recipe.write_text(yaml.safe_dump(recipe))
    table = "\n".join(compare_runs(list_runs(tmp_path), QueuePoller()))
    assert "API_KEY" in table
    assert "token" in table
    assert table.count("(in recipe.yaml)") == 6
    assert "sk-" not in table


def test_of_unlike_runs_the_usual_keys_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    for trial, value in (("a", 1), ("b", 2)):
        paths = make_run(tmp_path, trial, value)
        recipe = yaml.safe_load(paths.recipe.read_text())
        recipe["alerts"] = {f"bound_{number}": value for number in range(9)}
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


ASKED = {"valid": (("avg@k",), 1.0), "aime": (("pass@k", "pass@1", "cons@k"), 1.0)}


def found_of(root: Path, rewards: list[float], samples: list[list[float]]) -> EvaluationReport:
    """Evaluate step 0 of a run on 12 tasks of one sample and two of three."""
    paths = RunPaths(root)
    paths.data_dir.mkdir(parents=True)
    for name, count in (("valid", 12), ("aime", 2)):
        paths.evaluation_tasks(name).write_text("".join(f'{{"n": {n}}}\n' for n in range(count)))
        paths.evaluation(0, name).parent.mkdir(exist_ok=True, parents=True)
    mean = sum(rewards) / len(rewards)
    write_evaluation(paths, "valid", EvaluationResult(0, 12, mean, rewards, {3: "it fell"}, 1))
    means = [sum(triple) / 3 for triple in samples]
    answers = [["4", "4", "5"], ["7", "", ""]]
    aime = EvaluationResult(0, 2, sum(means) / 2, means, {}, 1, samples, answers)
    write_evaluation(paths, "aime", aime)
    return build_step_report(paths, 0, ASKED)


def test_a_report_has_every_number_and_survives_its_file(tmp_path: Path) -> None:
    report = found_of(tmp_path, [1.0] * 6 + [0.0] * 6, [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    write_evaluation_report(RunPaths(tmp_path), report)
    assert read_report(tmp_path) == report == read_report(RunPaths(tmp_path).evaluation_report)
    values = {name: estimate.value for name, estimate in report.sets["aime"].metrics.items()}
    assert values == pytest.approx({"avg@3": 0.5, "pass@3": 1.0, "pass@1": 0.5, "cons@3": 0.5})
    lines = list(format_report(report))
    assert lines[1].split() == ["valid", "avg@1", "0.500", "[0.224,", "0.776]", "12", "1"]
    assert "valid: the agent failed on 1 tasks, which count as 0" in lines
    stored = json.loads(RunPaths(tmp_path).evaluation_report.read_text())
    assert stored["sets"]["aime"]["samples"] == [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_one_task_alone_has_no_bounds_and_its_report_can_be_read_again(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.data_dir.mkdir(parents=True)
    paths.evaluation_tasks("valid").write_text('{"n": 0}\n')
    paths.evaluation(0, "valid").parent.mkdir(exist_ok=True, parents=True)
    write_evaluation(paths, "valid", EvaluationResult(0, 1, 7.0, [7.0], {}, 1))
    report = build_step_report(paths, 0, {"valid": (("avg@k",), 1.0)})
    write_evaluation_report(paths, report)
    assert read_report(tmp_path) == report
    assert list(format_report(report))[1].split() == [
        *("valid", "avg@1", "7.000", "[-inf,", "inf]", "1", "1")
    ]
    (same,) = compare_reports(report, report)
    assert same.comparison.verdict == "no difference is shown"


def test_two_reports_are_compared_by_task_on_every_metric(tmp_path: Path) -> None:
    samples = [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    before = found_of(tmp_path / "a", [1.0] * 7 + [0.0] * 5, samples)
    after = found_of(tmp_path / "b", [0.0] * 6 + [1.0] + [0.0] * 5, samples)
    rows = {(row.set_name, row.metric): row for row in compare_reports(before, after)}
    assert rows.keys() == {("valid", "avg@1")} | {
        ("aime", metric) for metric in ("avg@3", "pass@3", "pass@1", "cons@3")
    }
    worse = rows["valid", "avg@1"]
    assert (worse.comparison.better, worse.comparison.worse) == (0, 6)
    assert worse.comparison.difference.value == pytest.approx(-0.5)
    assert worse.comparison.verdict == "worse"
    assert rows["aime", "pass@3"].comparison.verdict == "no difference is shown"
    table = "\n".join(format_comparison("step 0", "step 20", list(rows.values())))
    assert "-0.500" in table
    assert "no difference is shown" in table


def evaluate(rewards: float, n_samples: int, metrics: tuple[str, ...]) -> EvaluationReport:
    """Evaluate 20 tasks, each with samples that all earn the same."""
    samples = [[rewards] * n_samples] * 20
    estimates = estimate_metrics(SetSamples(samples), metrics, 1.0)
    saved = {name: WrittenEstimate.from_estimate(estimate) for name, estimate in estimates.items()}
    played = EvaluatedSet("digest", saved, samples)
    return EvaluationReport(f"of {n_samples}", sets={"aime": played})


def test_means_of_other_numbers_of_samples_are_compared_and_what_is_not_is_told() -> None:
    before, after = evaluate(1.0, 8, ("pass@k",)), evaluate(0.0, 4, ("pass@k",))
    (mean,) = compared = compare_reports(before, after)
    assert (mean.metric, mean.before, mean.after) == ("avg@4 (avg@8 before)", 1.0, 0.0)
    assert mean.comparison.verdict == "worse"
    assert list(list_uncompared_metrics(before, after, compared)) == [
        "not compared: pass@4 of aime; of 8 has avg@8, pass@8"
    ]
    alike = compare_reports(after, after)
    assert list(list_uncompared_metrics(after, after, alike)) == []
    assert list(list_uncompared_metrics(msgspec.structs.replace(after, sets={}), after, [])) == [
        "not compared: avg@4, pass@4 of aime; of 4 was not evaluated on it"
    ]


def test_a_comparison_of_nothing_is_refused() -> None:
    after = evaluate(0.0, 4, ())
    nothing = msgspec.structs.replace(after.sets["aime"], metrics={})
    with pytest.raises(RecipeError, match="of 4 has no number of aime, this avg@4"):
        compare_reports(msgspec.structs.replace(after, sets={"aime": nothing}), after)


def test_other_tasks_and_other_sets_are_not_compared(tmp_path: Path) -> None:
    samples = [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    report = found_of(tmp_path, [1.0] * 12, samples)
    other = msgspec.structs.replace(report.sets["valid"], tasks_digest="another")
    with pytest.raises(RecipeError, match="other tasks of valid"):
        compare_reports(msgspec.structs.replace(report, sets={"valid": other}), report)
    lenient = msgspec.structs.replace(report.sets["aime"], pass_reward=0.5)
    with pytest.raises(RecipeError, match=r"passes from a reward of 1\.0 here, and of 0\.5"):
        compare_reports(msgspec.structs.replace(report, sets={"aime": lenient}), report)
    with pytest.raises(RecipeError, match="was evaluated on no set"):
        compare_reports(msgspec.structs.replace(report, sets={}), report)
    with pytest.raises(RecipeError, match="no results of an evaluation"):
        read_report(tmp_path / "nothing.json")

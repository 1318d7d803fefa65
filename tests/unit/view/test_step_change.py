"""Differences of a step from the steps before, and collapses of a run."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.view.answers.collapse import diagnose_collapse
from areal_hpc.view.answers.step_change import explain_step_difference
from areal_hpc.view.formatting import Answer
from tests.support.commands import exit_code_of
from tests.support.made_run import MadeEpisode, MadeRun


def make_group(task: int, reward: float, **facts: object) -> list[MadeEpisode]:
    episode = MadeEpisode(task=task, reward=reward)
    return [replace(episode, **facts)] * 4  # type: ignore[arg-type]


def add_usual_steps(run: MadeRun, count: int = 10) -> None:
    """Add steps over the tasks 0 to 5, again and again."""
    for step in range(count):
        tasks = (2 * step % 6, (2 * step + 1) % 6)
        run.add_step(
            [episode for task in tasks for episode in make_group(task, 0.6 + 0.01 * (step % 3))],
            reply__cut_fraction=0.02,
        )


def list_sentences(answer: Answer) -> str:
    return "\n".join((answer.headline, *(finding.text for finding in answer.findings)))


def test_a_curriculum_that_went_on_is_what_a_drop_is_laid_to(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_usual_steps(run, 29)
    run.add_step([*make_group(500, 0.1), *make_group(501, 0.1)], reply__cut_fraction=0.5)
    answer = explain_step_difference(run.paths, 30)
    assert answer.headline.startswith("the reward of step 30 is 0.100, ")
    assert "below the 0.610 of steps 20 to 29" in answer.headline
    assert answer.headline.endswith(
        "its tasks are from another part of the set: lines 500 to 501, before 0 to 5"
    )
    sentences = list_sentences(answer)
    assert "2 of 2 tasks were not in the steps before, their mean reward is 0.100" in sentences
    assert "reply/cut_fraction rose from 2.0% to 50%" in sentences
    (tasks,) = [finding for finding in answer.findings if "another part" in finding.text]
    assert tasks.page == (
        "#/trajectories?run=made%2Frun&where=step%3D30%20and%20kind%3Dtrain&sort=task"
    )


def test_sources_of_the_training_set_are_told_apart(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    run.paths.data_dir.mkdir()
    run.paths.train_source_sizes.write_text("[4, 2]")
    for _ in range(3):
        run.add_step([*make_group(0, 0.5), *make_group(1, 0.5)])
    run.add_step([*make_group(4, 0.1), *make_group(5, 0.1)])
    answer = explain_step_difference(run.paths, 4)
    assert answer.headline.endswith(
        "; source 1 of the training set gives 100% of the episodes, before 0%"
    )
    sentences = list_sentences(answer)
    assert "source 0 of the training set gives 0% of the episodes, before 100%" in sentences


def test_tasks_that_were_right_before_are_named_with_an_episode_to_read(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for _ in range(4):
        run.add_step([*make_group(0, 1.0), *make_group(1, 0.0)])
    run.add_step([*make_group(0, 0.25), *make_group(1, 0.0)])
    answer = explain_step_difference(run.paths, 5)
    assert "1 of 1 tasks that were right before are not now" in answer.headline
    (task,) = [one for one in answer.findings if one.text.startswith("task 0: 0.250, before 1.000")]
    assert "episode 0 of ticket 8, step 5 has 0.25" in task.text
    assert task.page.startswith("#/trajectory?run=made%2Frun&row=cell-0-000004.h5%2F0")


def test_new_tasks_are_no_cause_where_every_step_has_new_ones(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for step in range(5):
        run.add_step(make_group(step, 0.5))
    answer = explain_step_difference(run.paths, 5)
    assert answer.headline.endswith("nothing else differs either")
    assert "1 of 1 tasks were not in the steps before" in list_sentences(answer)


def test_a_parameter_that_each_call_has_anew_is_no_change(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for step in range(6):
        run.add_step(
            [
                MadeEpisode(sampling={"max_new_tokens": 1000 - 10 * step - index, "top_p": 0.9})
                for index in range(4)
            ]
        )
    run.add_step(
        [MadeEpisode(sampling={"max_new_tokens": 500 + n, "top_p": 0.8}) for n in range(4)]
    )
    sentences = list_sentences(explain_step_difference(run.paths, 7))
    assert "calls ask for top_p=0.8, before 0.9" in sentences
    assert "max_new_tokens" not in sentences


def test_restarts_events_and_changed_calls_are_told(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    for _ in range(3):
        run.add_step(make_group(0, 0.5, sampling={"temperature": 1.0, "sampling_seed": 3}))
    run.now += 1.0
    run.add_event("cell-1", "process_exited", process="driver", exit_code=1)
    run.add_event("cell-0", "weights_published")
    run.add_step(
        make_group(0, 0.5, sampling={"temperature": 0.2, "sampling_seed": 4}), generation=2
    )
    sentences = list_sentences(explain_step_difference(run.paths, 4))
    assert "the trainer was started again before this step (generation 2)" in sentences
    assert "calls ask for temperature=0.2, before 1.0" in sentences
    assert "sampling_seed" not in sentences
    assert "meanwhile: process_exited (cell-1)" in sentences
    assert "weights_published" not in sentences


def test_a_recipe_that_a_resume_changed_is_the_first_cause(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_usual_steps(run, 3)
    at = datetime.fromtimestamp(run.now + 0.1, UTC).isoformat()
    launches = [{"attempt": 1, "time": "2020-01-01T00:00:00+00:00"}, {"attempt": 2, "time": at}]
    run.paths.provenance.write_text(json.dumps({"launches": launches}))
    now = run.paths.recipe.read_text()
    variables = "agents: {variables: {KEY: %s}}"
    old = now.replace("checkpoint_every_steps: 1", "checkpoint_every_steps: 7")
    run.paths.replaced_recipe(2).write_text(old + variables % "old-secret")
    run.paths.recipe.write_text(now + variables % "new-secret")
    add_usual_steps(run, 1)
    answer = explain_step_difference(run.paths, 4)
    assert "launch 2 changed" in answer.headline
    sentences = list_sentences(answer)
    assert "launch 2 changed trainer.checkpoint_every_steps from 7 to 1" in sentences
    assert "launch 2 changed agents.variables.KEY" in sentences
    assert "secret" not in sentences


def test_a_step_that_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_usual_steps(run, 3)
    with pytest.raises(RecipeError, match="step 9 is not among the trained ones: steps 1 to 3"):
        explain_step_difference(run.paths, 9)
    with pytest.raises(RecipeError, match="step 2 has 1 trained steps before it"):
        explain_step_difference(run.paths, 2)


GROUP = [MadeEpisode(task=index // 4, reply=(index, 1, 2)) for index in range(8)]
ALIKE = [replace(episode, reply=(5, 5, 5)) for episode in GROUP]


def add_steps(
    run: MadeRun, count: int, episodes: list[MadeEpisode], reward: float, **metrics: Any
) -> None:
    for _ in range(count):
        run.add_step([replace(episode, reward=reward) for episode in episodes], **metrics)


HEALTHY: dict[str, Any] = {
    "entropy__mean": 0.6,
    "reply__tokens_mean": 40.0,
    "reply__repeated_fraction": 0.02,
    "groups__zero_variance": 0.1,
    "groups__all_best": 0.1,
}


def test_a_collapse_is_told_with_its_step_and_its_numbers(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 8, GROUP, 0.5, **HEALTHY)
    add_steps(run, 4, GROUP, 0.7, **HEALTHY)
    broken = {"entropy__mean": 0.05, "reply__repeated_fraction": 0.8, "groups__zero_variance": 0.9}
    add_steps(run, 8, ALIKE, 0.1, **(HEALTHY | broken))
    answer = diagnose_collapse(run.paths)
    assert answer.headline.startswith("the policy collapses since about step 1")
    assert not answer.is_well
    texts = [finding.text for finding in answer.findings]
    assert texts[0].startswith(
        "the reward fell from 0.660, its best, at step 12 to 0.100 at step 20"
    )
    assert (
        "entropy/mean: 0.6 nats (steps 1 to 5), 0.05 nats (steps 16 to 20): the policy is nearly "
        "sure of every token, half of the way at step 13"
    ) in texts
    (replies,) = [one for one in answer.findings if one.text.startswith("distinct replies")]
    assert replies.text.startswith("distinct replies of a group: 100% at step 1, 25% at step 20")
    assert replies.page == "#/trajectories?run=made%2Frun&where=step%3D20&sort=ticket"
    assert any("reply/repeated_fraction: 2.0%" in text and "loops" in text for text in texts)
    assert answer.hints[0] == "go back to a checkpoint of step 12 or before"


LOOPS = {"entropy__mean": 0.05, "reply__repeated_fraction": 0.8, "reply__tokens_mean": 400.0}
SOLVED = {"entropy__mean": 0.05, "groups__zero_variance": 0.9, "groups__all_best": 0.9}
HARDER = {"groups__all_worst": 0.8, "groups__zero_variance": 0.9}
TURNS = [
    # the reward of ten steps, those after them, the headline and its hint
    (0.5, (15, GROUP, 0.5, LOOPS), "the policy collapses since about step 11: ", "of step 10 or"),
    (0.3, (10, ALIKE, 1.0, SOLVED), "the policy does not collapse, it has solved its tasks", ""),
    (
        0.3,
        (10, GROUP, 0.6, {"reply__repeated_fraction": 0.6}),
        "the policy does not collapse yet, the reward holds; but replies end in loops",
        "",
    ),
    (0.9, (5, GROUP, 0.2, HARDER), "the reward fell, but not by a collapse", "--step 11 compares"),
]


@pytest.mark.parametrize(("reward", "after", "headline", "hint"), TURNS)
def test_a_collapse_is_told_from_what_looks_like_one(
    tmp_path: Path, reward: float, after: tuple[Any, ...], headline: str, hint: str
) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 10, GROUP, reward, **HEALTHY)
    *steps, metrics = after
    add_steps(run, *steps, **(HEALTHY | metrics))
    answer = diagnose_collapse(run.paths)
    assert answer.headline.startswith(headline)
    assert hint in " ".join([answer.headline, *answer.hints])
    assert answer.is_well == ("collapses since" not in headline)


def test_a_run_that_goes_on_well_and_one_that_is_short(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 3, GROUP, 0.4, **HEALTHY)
    assert diagnose_collapse(run.paths).headline.startswith("trained steps: 3; at least 6")
    add_steps(run, 9, GROUP, 0.5, **HEALTHY)
    assert diagnose_collapse(run.paths).headline == "the policy does not collapse"


def test_the_command_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 8, GROUP, 0.9, **HEALTHY)
    before = sorted(run.paths.root.rglob("*"))
    for words, start in (
        (("--slow",), "the run is limited by generation"),
        (("--step", "8"), "the reward of step 8 is 0.900"),
        (("--collapse",), "the policy does not collapse"),
    ):
        assert exit_code_of("why", str(run.paths.root), *words) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(start)
        assert "    #/" in shown
        assert f"pages: areal-hpc view {run.paths.root} prints" in shown
    assert sorted(run.paths.root.rglob("*")) == before
    add_steps(run, 8, ALIKE, 0.1, **HEALTHY)
    assert exit_code_of("why", str(run.paths.root), "--collapse") == 1
    assert exit_code_of("why", str(run.paths.root), "--collapse", "--slow") == 2

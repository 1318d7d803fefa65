"""Whether a run collapses: runs that do, that have solved their tasks, and that go on well."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_hpc.view.answers.collapse import diagnose_collapse
from tests.support.commands import exit_code_of
from tests.support.made_run import MadeEpisode, MadeRun

GROUP = [MadeEpisode(task=place // 4, reply=(place, 1, 2)) for place in range(8)]
ALIKE = [replace(one, reply=(5, 5, 5)) for one in GROUP]


def add_steps(
    run: MadeRun, count: int, episodes: list[MadeEpisode], reward: float, **metrics: Any
) -> None:
    for _ in range(count):
        run.add_step([replace(one, reward=reward) for one in episodes], **metrics)


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
    said = [one.text for one in answer.findings]
    assert said[0].startswith(
        "the reward fell from 0.660, its best, at step 12 to 0.100 at step 20"
    )
    assert (
        "entropy/mean: 0.6 nats (steps 1 to 5), 0.05 nats (steps 16 to 20): the policy is nearly "
        "sure of every token, half of the way at step 13"
    ) in said
    (replies,) = [one for one in answer.findings if one.text.startswith("distinct replies")]
    assert replies.text.startswith("distinct replies of a group: 100% at step 1, 25% at step 20")
    assert replies.page == "#/trajectories?run=made%2Frun&where=step%3D20&sort=ticket"
    assert any("reply/repeated_fraction: 2.0%" in one and "loops" in one for one in said)
    assert answer.hints[0] == "go back to a checkpoint of step 12 or before"


def test_a_collapse_under_a_reward_that_holds_is_told_to_go_back_before_it(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 10, GROUP, 0.5, **HEALTHY)
    broken = {"entropy__mean": 0.05, "reply__repeated_fraction": 0.8, "reply__tokens_mean": 400.0}
    add_steps(run, 15, GROUP, 0.5, **(HEALTHY | broken))
    answer = diagnose_collapse(run.paths)
    assert answer.headline.startswith("the policy collapses since about step 11: ")
    assert answer.hints[0] == "go back to a checkpoint of step 10 or before"


def test_a_run_that_has_solved_its_tasks_does_not_collapse(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 10, GROUP, 0.3, **HEALTHY)
    solved = {"entropy__mean": 0.05, "groups__zero_variance": 0.9, "groups__all_best": 0.9}
    add_steps(run, 10, ALIKE, 1.0, **(HEALTHY | solved))
    answer = diagnose_collapse(run.paths)
    assert answer.headline.startswith("the policy does not collapse, it has solved its tasks")
    assert answer.is_well


def test_signs_without_a_fall_are_a_warning(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 10, GROUP, 0.3, **HEALTHY)
    add_steps(run, 10, GROUP, 0.6, **(HEALTHY | {"reply__repeated_fraction": 0.6}))
    answer = diagnose_collapse(run.paths)
    assert answer.headline == (
        "the policy does not collapse yet, the reward holds; but replies end in loops"
    )


def test_a_fall_without_signs_is_no_collapse(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 10, GROUP, 0.9, **HEALTHY)
    harder = {"groups__all_worst": 0.8, "groups__zero_variance": 0.9}
    add_steps(run, 5, GROUP, 0.2, **(HEALTHY | harder))
    answer = diagnose_collapse(run.paths)
    assert answer.headline.startswith("the reward fell, but not by a collapse")
    assert "--step 11 compares" in answer.headline


def test_a_run_that_goes_on_well_and_one_that_is_short(tmp_path: Path) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 3, GROUP, 0.4, **HEALTHY)
    assert diagnose_collapse(run.paths).headline.startswith("trained steps: 3; at least 6")
    add_steps(run, 9, GROUP, 0.5, **HEALTHY)
    assert diagnose_collapse(run.paths).headline == "the policy does not collapse"


def test_the_command_prints_sentences_and_pages_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = MadeRun(tmp_path)
    add_steps(run, 8, GROUP, 0.9, **HEALTHY)
    before = sorted(run.paths.root.rglob("*"))
    for words, said in (
        (("--slow",), "the run is limited by generation"),
        (("--step", "8"), "the reward of step 8 is 0.900"),
        (("--collapse",), "the policy does not collapse"),
    ):
        assert exit_code_of("why", str(run.paths.root), *words) == 0
        shown = capsys.readouterr().out
        assert shown.startswith(said)
        assert "    #/" in shown
        assert f"pages: areal-hpc view {run.paths.root} prints" in shown
    assert sorted(run.paths.root.rglob("*")) == before
    add_steps(run, 8, ALIKE, 0.1, **HEALTHY)
    assert exit_code_of("why", str(run.paths.root), "--collapse") == 1
    assert exit_code_of("why", str(run.paths.root), "--collapse", "--slow") == 2

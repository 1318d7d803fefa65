"""`why --hacking` names the evidence, the step since which it holds, and the episodes to read."""

from pathlib import Path

import pytest

from areal_hpc.view.answers import reward_hacking
from areal_hpc.view.answers.reward_hacking import MAX_SHOWN_EPISODES, diagnose_reward_hacking
from tests.support.commands import exit_code_of
from tests.support.made_run import SAMPLES, MadeEpisode, MadeRun, make_cheating_run


def test_a_cheat_is_told_with_the_episodes_to_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_cheating_run(tmp_path, 12)
    answer = diagnose_reward_hacking(run.paths)
    assert answer.headline == (
        "the reward may be cheated since step 8: it rises from 0.167 to 0.917, and something "
        "disagrees"
    )
    judge, side_by_side, *episodes = answer.findings
    assert judge.text == "the held-out evaluation/judge/avg@1 goes from 0.2 to 0.1"
    assert len(episodes) == MAX_SHOWN_EPISODES
    assert len({episode.text.split(" of ")[1] for episode in episodes}) == MAX_SHOWN_EPISODES
    assert all(episode.text.endswith("step 12, reward 1") for episode in episodes)
    rows = [episode.page.partition("row=")[2] for episode in episodes]
    assert side_by_side.page == f"#/side_by_side?run=made%2Frun&rows={'%2C'.join(rows)}"
    assert exit_code_of("why", str(run.paths.root), "--hacking") == 1
    assert "#/side_by_side?" in capsys.readouterr().out


def test_the_search_for_the_first_suspect_step_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_hacking, "MAX_EARLIER_WINDOWS", 2)
    answer = diagnose_reward_hacking(make_cheating_run(tmp_path, 12).paths)
    assert "since step 10 or before: it rises from 0.167 to 0.917" in answer.headline


def test_a_short_run_and_one_without_disagreement_are_well(tmp_path: Path) -> None:
    short = diagnose_reward_hacking(make_cheating_run(tmp_path / "short", 7).paths)
    assert short.headline.startswith("nothing that is watched disagrees with the reward of 7 steps")
    run = MadeRun(tmp_path)
    for _ in range(8):
        run.add_step([MadeEpisode()] * SAMPLES)
    assert diagnose_reward_hacking(run.paths).is_well

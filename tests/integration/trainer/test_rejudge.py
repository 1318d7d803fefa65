"""`areal-hpc rejudge` gives recorded episodes new rewards, and a replay trains on them."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_hpc.errors import RecipeError
from areal_hpc.launch.rejudge import list_unjudged_episodes
from areal_hpc.launch.replay import RecordedStepsReplay
from areal_hpc.recipe.sections.rollout import AgentExecutionConfig
from areal_hpc.rollout.execution.agent_sandboxes import make_agent_sandboxes
from areal_hpc.rundir.jsonl import append_line, read_readable_records
from areal_hpc.rundir.manifests import read_manifest
from areal_hpc.rundir.paths import RunPaths
from areal_hpc.rundir.rejudged_rewards import require_rejudged_episodes
from tests.support.commands import areal_hpc, exit_code_of, said_by
from tests.support.rank_server import RankServer
from tests.support.recorded_run import SAMPLES, TICKETS, TRAINER, record_run, write_recipe
from tests.support.run_files import list_files

STEPS = 2
SETTINGS = {"total_steps": STEPS}
WRONG = [0.0, 1.0, 0.0, 1.0]
FUNCTIONS = "tests.support.rejudging"
RIGHT = f"{FUNCTIONS}:read_said"


def record(root: Path, *, wrong: bool) -> RunPaths:
    rewards = dict.fromkeys(range(1, STEPS + 1), WRONG) if wrong else None
    paths = record_run(root, STEPS, rewards=rewards, says_rewards=True)
    paths.dataset("train").write_text((json.dumps({"scale": 1.0}) + "\n") * 2)
    write_recipe(paths, {**TRAINER, **SETTINGS})
    return paths


@pytest.fixture
def misjudged(tmp_path: Path) -> RunPaths:
    return record(tmp_path / "wrong" / "run", wrong=True)


def test_a_rejudged_run_trains_as_one_that_had_the_right_reward_from_the_start(
    ranks: RankServer, misjudged: RunPaths, tmp_path: Path
) -> None:
    right = record(tmp_path / "right" / "run", wrong=False)
    assert ranks.run(right, "replay", trainer=SETTINGS).codes == [0]
    before = list_files(misjudged.root)
    assert "rewards differ" in said_by(areal_hpc("rejudge", misjudged.root, "--reward", RIGHT))
    out = tmp_path / "out"
    told = said_by(areal_hpc("replay", misjudged.root, "--rewards", RIGHT, "--out", out))
    expected, trained = (
        read_readable_records(RunPaths(root).metrics) for root in (right.root, out)
    )
    assert [line["step"] for line in trained] == [1, 2]
    for line, other in zip(trained, expected, strict=True):
        for name in ("loss", "grad_norm", "entropy/mean", "reward/mean"):
            assert line[name] == other[name]
    compared = [
        [line["logprob/compared_tokens"] for line in lines] for lines in (expected, trained)
    ]
    assert compared[0][1] > 0
    assert compared[1] == [compared[0][0], 0], "the engine has never had the replay's weights"
    table = told[told.index("step  recorded rewards") :].splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [["1", "0.500"], ["2", "0.500"]]
    assert f"{expected[0]['reward/mean']:.3f} [" in table[1]
    assert table[3].startswith("would have learned ")
    rewards = misjudged.rejudged_rewards(RIGHT)
    RecordedStepsReplay(misjudged, 1, STEPS, (), RunPaths(out), RIGHT)  # the same replay goes on
    episode, *_ = require_rejudged_episodes(misjudged, RIGHT)
    append_line(rewards, msgspec.structs.replace(episode, reward=0.25))
    with pytest.raises(RecipeError, match=f"with former rewards of {RIGHT}, and episodes have"):
        RecordedStepsReplay(misjudged, 1, STEPS, (), RunPaths(out), RIGHT)
    assert list_files(misjudged.root).keys() - before.keys() == {rewards, rewards.parent}


def test_new_rewards_stand_beside_the_recorded_ones_with_their_differences(
    misjudged: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("rejudge", misjudged.root, "--reward", RIGHT)
    assert exit_code_of(*command, "--steps", "1:1", "--only", "failed") == 0
    lines = read_readable_records(misjudged.rejudged_rewards(RIGHT))
    assert [line["old_reward"] for line in lines] == [0.0] * TICKETS * (SAMPLES // 2)
    assert exit_code_of(*command) == 0  # judges the others alone
    said = capsys.readouterr().out
    lines = read_readable_records(misjudged.rejudged_rewards(RIGHT))
    assert len(lines) == len({line["session_id"] for line in lines}) == STEPS * TICKETS * SAMPLES
    differences = [abs(line["reward"] - line["old_reward"]) for line in lines]
    changed = sum(difference > 0 for difference in differences)
    assert f"{changed} of {len(lines)} rewards differ" in said
    assert said.count("#/trajectory?run=wrong%2Frun&row=") >= 10
    assert "rank correlation  " in said
    rewarded = {(line["shard"], line["rows"][0]): line["reward"] for line in lines}
    stored = read_manifest(misjudged, 1).tickets[0]
    right = read_manifest(record(misjudged.root.with_name("right"), wrong=False), 1).tickets[0]
    assert [rewarded[stored.shard, row] for row in stored.rows] == right.rewards


def test_an_asynchronous_function_may_read_the_conversation(misjudged: RunPaths) -> None:
    function = f"{FUNCTIONS}:count_messages"
    assert exit_code_of("rejudge", misjudged.root, "--reward", function) == 0
    lines = read_readable_records(misjudged.rejudged_rewards(function))
    assert {line["reward"] for line in lines} == {2.0}


async def keep_files(how: AgentExecutionConfig, archive: Path) -> None:
    sandboxes, data = make_agent_sandboxes(how, warm=0), dict[str, Any]()
    assert sandboxes is not None
    async with sandboxes.acquire({}) as episode:
        await episode.hand_to_agent(data, "http://127.0.0.1:1/v1", "key", 60.0)
        ended = await data["sandbox"].exec(
            "mkdir made && echo 0.25 > made/score && ln -s score made/link && mkfifo made/pipe"
        )
        assert ended.exit_code == 0
        await episode.keep_files(archive)
    await sandboxes.close()


def test_a_function_reads_the_kept_files_of_a_sandbox(misjudged: RunPaths) -> None:
    agent = {"isolation": "none", "sandbox": {"keep_files": ["**/*"]}}
    rollout = {"workflow": "any.Agent", "n_samples": SAMPLES, "agent": agent}
    write_recipe(misjudged, {**TRAINER, **SETTINGS}, rollout=rollout)
    sessions = [
        unjudged.session_id
        for step in range(1, STEPS + 1)
        for unjudged, _ in list_unjudged_episodes(misjudged, step)
    ]
    first, *others, without = [misjudged.kept_files_dir / f"{name}.tar" for name in sessions]
    asyncio.run(keep_files(AgentExecutionConfig.model_validate(agent), first))
    for archive in others:
        shutil.copy(first, archive)
    function = f"{FUNCTIONS}:read_score"
    assert exit_code_of("rejudge", misjudged.root, "--reward", function) == 1
    lines = read_readable_records(misjudged.rejudged_rewards(function))
    assert [line.get("reward") for line in lines].count(0.25) == len(sessions) - 1
    (refused,) = [line["error"] for line in lines if "reward" not in line]
    assert "no files of this episode's sandbox were kept" in refused
    assert str(without) in refused


def test_episodes_without_a_new_reward_are_counted_and_judged_again(
    misjudged: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    function = f"{FUNCTIONS}:fail_on_zero"
    failing = sum(line["reward"] == 0 for line in read_rewards(misjudged, RIGHT))
    capsys.readouterr()
    for _ in range(2):
        assert exit_code_of("rejudge", misjudged.root, "--reward", function) == 1
        assert f"{failing} episodes have no new reward, the first for ZeroDivisionError" in (
            capsys.readouterr().out
        )
    lines = read_readable_records(misjudged.rejudged_rewards(function))
    assert len(lines) == STEPS * TICKETS * SAMPLES + failing


def test_an_episode_that_the_function_does_not_fit_keeps_no_other_from_its_reward(
    misjudged: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    misjudged.dataset("train").write_text('{"scale": 1.0}\n{"size": 1}\n')
    assert exit_code_of("rejudge", misjudged.root, "--reward", RIGHT) == 1
    lines = read_readable_records(misjudged.rejudged_rewards(RIGHT))
    assert len(lines) == STEPS * TICKETS * SAMPLES
    errors = [line["error"] for line in lines if "reward" not in line]
    assert len(errors) == len(lines) // 2
    assert all("missing a required argument: 'scale'" in error for error in errors)
    said = capsys.readouterr().out
    assert f"{len(errors)} episodes have no new reward, the first for" in said


def test_a_function_has_the_isolation_of_the_run(misjudged: RunPaths) -> None:
    for isolation, reward in (("bwrap", 0.0), ("none", 1.0)):
        write_recipe(misjudged, {**TRAINER, **SETTINGS}, reward={"isolation": isolation})
        function = f"{FUNCTIONS}:read_isolation"
        misjudged.rejudged_rewards(function).unlink(missing_ok=True)
        assert {line["reward"] for line in read_rewards(misjudged, function)} == {reward}


def read_rewards(run: RunPaths, function: str) -> list[dict[str, float]]:
    assert exit_code_of("rejudge", run.root, "--reward", function) == 0
    return read_readable_records(run.rejudged_rewards(function))


def test_what_cannot_be_rejudged_or_replayed_is_refused(
    misjudged: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, error in [
        (("rejudge", "--reward", f"{FUNCTIONS}:judge_folder"), "too many positional arguments"),
        (("rejudge", "--reward", f"{FUNCTIONS}:no_such"), "has no 'no_such'"),
        (("rejudge", "--reward", RIGHT, "--steps", "2..3"), "the batch of step 3 is not recorded"),
        (("replay", "--rewards", "mine:strict"), "the run has no rewards of mine:strict"),
    ]:
        assert exit_code_of(words[0], misjudged.root, *words[1:]) == RecipeError.exit_code, words
        assert error in capsys.readouterr().err
    read_rewards(misjudged, RIGHT)
    out = RunPaths(misjudged.root.with_name("out"))
    credit = ("trainer.objective.credit=turn",)
    with pytest.raises(RecipeError, match="credit=turn trains on rewards of single replies"):
        RecordedStepsReplay(misjudged, 1, 2, credit, out, RIGHT)
    preset = ("trainer.objective.preset=gspo", "trainer.minibatches=3")
    replay = RecordedStepsReplay(misjudged, 1, 2, preset, out, RIGHT)
    assert replay.recipe.trainer.objective.ratio_level == "sequence"

"""`areal-hpc start`: a person's program, their verdict, and the place where the session is kept."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from areal_hpc.shards.index import read_index
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import OfferEpisodeReply, OfferEpisodeRequest, StartSessionRequest
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.waiting import wait_for

PROGRAM = f"""#!{sys.executable}
import json, os, sys, urllib.error, urllib.request

def post(url, body):
    headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as refusal:
        return refusal.code

for word in sys.argv[1:]:
    body = {{"messages": [{{"role": "user", "content": word}}]}}
    assert post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) == 200
reward = post(os.environ["ANTHROPIC_BASE_URL"] + "/rl/set_reward", {{"reward": 1e6}})
home = os.environ.get("GEMINI_CLI_HOME")
print(f"own reward {{reward}}", home and open(home + "/.gemini/settings.json").read(), flush=True)
"""
"""Program that says each of its arguments to the model, and tries to reward itself."""
TASK = {"messages": [{"role": "user", "content": "add 2 and 2"}]}
CONFIGS = {
    "inline": {},
    "programs": {"mode": "online"},
    "people": {"mode": "online", "train_on": "people"},
}


@pytest.fixture(scope="module", params=[*CONFIGS])
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    agent = CONFIGS[request.param]
    stage = Stage(tmp_path_factory.mktemp("stage"), agent=agent, shards={"seal_after_s": 0.3})
    yield stage
    stage.close()


@pytest.fixture
def gemini(tmp_path: Path) -> Path:
    """Put a program of that name on PATH."""
    program = tmp_path / "gemini"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return program


def start(program: Path, *words: str, said: str = "") -> tuple[int, str]:
    """Run `areal-hpc start` with a person's input; return its exit code and output."""
    ended = subprocess.run(
        [sys.executable, "-m", "areal_hpc", "start", *words],
        input=said,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=scaled(120),
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"},
    )
    return ended.returncode, ended.stdout


def list_personal_rows(stage: Stage) -> list[TrajectoryRow]:
    episodes = [
        part for shard in read_index(stage.paths.shard_index_dir) for part in shard.untrained
    ]
    return [row for part in episodes for row in stage.untrained_rows(part.session_id)]


def test_a_verdict_is_the_reward_and_trained_where_people_are(stage: Stage, gemini: Path) -> None:
    run, trains = str(stage.paths.root), "train_on: people" in stage.paths.recipe.read_text()
    ref = TicketRef(7, 0)
    offer = OfferEpisodeRequest(StartSessionRequest("train", ref), TASK, 60.0)
    offered = stage.begin("/rl/offer_episode", offer) if trains else None
    code, output = start(gemini, run, "--", str(gemini), "hi", "there", said="x\n6\nnear\n")
    assert (code, "own reward 403" in output) == (0, True), output
    assert "replies: 2, reward 0.667" in output
    assert "expected one digit, got 'x'" in output
    if offered is None:
        wait_for(lambda: list_personal_rows(stage), scaled(20), lambda: stage.log)
        rows = list_personal_rows(stage)
        assert {(row.kind, row.ticket_id) for row in rows} == {(RowKind.PERSONAL, -1)}
        assert stage.seal() == 0, "the trainer gets none of it"
    else:
        assert "add 2 and 2" in output
        taken = msgspec.json.decode(offered.getresponse().read(), type=OfferEpisodeReply)
        offered.close()
        assert taken.session_id is not None
        stage.finish_ticket(ref, taken.session_id)
        assert stage.seal() == 1
        rows = stage.sealed_rows(ref)
    assert [row.reward for row in rows] == pytest.approx([6 / 9] * 2)
    notes = [call.reward.note for row in rows for call in row.record.calls if call.reward]
    assert notes == ["near"]


def test_a_harness_gets_its_settings_and_without_a_verdict_nothing_is_kept(
    stage: Stage, gemini: Path
) -> None:
    before = len(list_personal_rows(stage))
    if "train_on: people" in stage.paths.recipe.read_text():
        code, output = start(gemini, "gemini-cli", str(stage.paths.root))
        assert (code, "no episode is waiting" in output) == (75, True), output
        stage.kill_proxy()
        code, output = start(gemini, "gemini-cli", str(stage.paths.root))
        assert (code, "none of the 1 cells of this run serves" in output) == (75, True), output
        stage.start_proxy()
        return
    code, output = start(gemini, "gemini-cli", str(stage.paths.root), said="\n")
    assert code == 0, output
    assert '"selectedType": "gemini-api-key"' in output
    assert "replies: 2, no verdict: nothing is kept" in output
    stage.restart_proxy()
    assert len(list_personal_rows(stage)) == before
    code, output = start(gemini, "--print-env", str(stage.paths.root), said="\n")
    assert (code, "export OPENAI_API_KEY=sk-" in output) == (0, True), output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gemini-cly", "RUN"], "did you mean 'gemini-cli'"),
        (["pi", "RUN"], "choose from claude-code, codex, gemini-cli, qwen-code, opencode"),
        (["RUN"], "expected a harness and a run, or a run and a command"),
        (["codex"], "expected a harness and a run, or a run and a command"),
        (["RUN", "--", "no-such-program"], "there is no program no-such-program"),
    ],
)
def test_a_mistake_is_explained(words: list[str], message: str, stage: Stage, gemini: Path) -> None:
    if "train_on" not in stage.paths.recipe.read_text():
        words = [str(stage.paths.root) if word == "RUN" else word for word in words]
        code, output = start(gemini, *words)
        assert (code, message in output, "Traceback" in output) == (78, True, False), output

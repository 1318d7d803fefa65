"""`areal-hpc start`: a person's program, their verdict, and the place where the session is kept."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from areal_hpc.agents.harness.personal_session import open_session_at_any_cell
from areal_hpc.recipe.recipe import Recipe
from areal_hpc.rundir.run_inputs import read_run_recipe
from areal_hpc.shards.index import read_index
from areal_hpc.wire.ledger import TicketRef
from areal_hpc.wire.proxy import (
    AwaitSessionEndRequest,
    OfferEpisodeReply,
    OfferEpisodeRequest,
    ProxyHealth,
    StartSessionReply,
    StartSessionRequest,
)
from areal_hpc.wire.trajectory import RowKind, TrajectoryRow
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import StandIn
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


class OtherCell(StandIn):
    """Cell at which an episode waits."""

    endpoint = "proxy-cell-1"

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/healthz", self._say), web.post("/rl/start_session", self._say)]

    async def _say(self, request: web.Request) -> web.Response:
        replies = {
            "/healthz": ProxyHealth(0, 0, 0, replicas_serving=1),
            "/rl/start_session": StartSessionReply("of cell 1", "key", "control", TASK),
        }
        return web.Response(body=msgspec.json.encode(replies[request.path]))


@pytest.mark.parametrize("stage", ["people"], indirect=True)
def test_where_no_episode_waits_the_next_cell_is_asked(stage: Stage) -> None:
    other = OtherCell(stage.paths.rendezvous_dir, stage.service_key)
    stage.loop.run(other.start())
    recipe = Recipe.model_validate(read_run_recipe(stage.paths.recipe))
    inference = recipe.inference.model_copy(update={"cells": 2})
    both = recipe.model_copy(update={"inference": inference})
    try:
        proxy, opened = open_session_at_any_cell(stage.paths, both)
        proxy.close()
    finally:
        stage.loop.run(other.stop())
    assert opened.session_id == "of cell 1"


@pytest.mark.parametrize("stage", ["people"], indirect=True)
def test_a_verdict_after_the_episode_s_time_is_not_called_trained(
    stage: Stage, gemini: Path
) -> None:
    task = {**TASK, "limits": {"timeout_s": 0.01}}
    offer = OfferEpisodeRequest(StartSessionRequest("train", TicketRef(8, 0)), task, 60.0)
    with closing(stage.begin("/rl/offer_episode", offer)):
        run = str(stage.paths.root)
        code, output = start(gemini, run, "--", str(gemini), "hi", said="6\n\n")
    assert (code, "give your verdict within 0.01 s" in output) == (0, True), output
    assert "reward 0.667: not trained, as it came after the episode's time" in output


@pytest.mark.parametrize("stage", ["people"], indirect=True)
@pytest.mark.parametrize("end", [signal.SIGHUP, signal.SIGTERM, "deleted"])
def test_a_session_ends_with_its_terminal_and_a_deleted_one_is_told(
    end: signal.Signals | str, stage: Stage
) -> None:
    ref = TicketRef(9 if end == "deleted" else int(end), 1)
    offer = OfferEpisodeRequest(StartSessionRequest("train", ref), TASK, 60.0)
    with closing(stage.begin("/rl/offer_episode", offer)) as offered:
        person = subprocess.Popen(
            [sys.executable, "-m", "areal_hpc", "start", "--print-env", str(stage.paths.root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert person.stdout is not None
        while "press Enter" not in (line := person.stdout.readline()):
            assert line, "it has ended"
        taken = msgspec.json.decode(offered.getresponse().read(), type=OfferEpisodeReply)
    assert taken.session_id is not None
    if isinstance(end, signal.Signals):
        person.send_signal(end)
        _, _ = person.communicate(timeout=scaled(60))
        assert person.returncode == 128 + end
        request = AwaitSessionEndRequest(taken.session_id, 0.0)
        assert stage.post("/rl/await_session", request, stage.driver_key).json()["ended"]
        return
    other, key = stage.open_session(ref)
    assert stage.ask(key, "hi").status_code == 200
    stage.finish_session(key, 1.0)
    stage.finish_ticket(ref, other)  # the session of the person is deleted
    output, _ = person.communicate("\n6\n\n", timeout=scaled(60))
    assert (person.returncode, "the session is over: nothing is kept" in output) == (0, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gemini-cly", "RUN"], "did you mean 'gemini-cli'"),
        (["pi", "RUN"], "choose from claude-code, codex, gemini-cli, qwen-code, opencode"),
        (["RUN"], "expected a harness and a run or a model"),
        (["codex"], "expected a harness and a run or a model"),
        (["RUN", "--", "no-such-program"], "there is no program no-such-program"),
    ],
)
def test_a_mistake_is_explained(words: list[str], message: str, stage: Stage, gemini: Path) -> None:
    if "train_on" not in stage.paths.recipe.read_text():
        words = [str(stage.paths.root) if word == "RUN" else word for word in words]
        code, output = start(gemini, *words)
        assert (code, message in output, "Traceback" in output) == (78, True, False), output

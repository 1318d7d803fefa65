"""Calls survive servers that die, pause, answer wrongly and return, mostly unnoticed."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from areal_hpc.proxy.config import ProxyJobConfig
from areal_hpc.proxy.job import make_journal_path
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script, ScriptedSGLang


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", ["hang_up", "500", "garbage"])
def test_calls_without_reply_are_repeated(stage: Stage, key: str, fault: str, stream: bool) -> None:
    faults = iter([fault])
    stage.sglang.script = lambda request: Script(fault=next(faults, ""))
    answer = stage.ask(key, "hi", stream=stream)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text
    assert [entry.reply["content"] for entry in stage.journaled(key)] == ["hello world"]
    first, second = stage.sglang.requests
    assert first["input_ids"] == second["input_ids"]
    assert first["rid"] != second["rid"]
    assert stage.end_session(key) == 1


def test_requests_wait_while_no_replica_serves(stage: Stage, key: str) -> None:
    stage.route_to(stage.sglang.url, state="ready")
    with ThreadPoolExecutor(1) as agent:
        call = agent.submit(stage.ask, key, "hi")
        time.sleep(0.4)
        assert not call.done()
        polls = stage.relay.polls
        stage.relay.show(stage.sglang.url)
        assert call.result().status_code == 200
    assert stage.relay.polls - polls <= 2, "answered as soon as the proxy knows"


@pytest.mark.parametrize("own_stage", [{"proxy": {"request_timeout_s": 0.5}}], indirect=True)
def test_without_any_replica_the_wait_ends_with_503(own_stage: Stage) -> None:
    own_stage.route_to()
    _, key = own_stage.open_session()
    answer = own_stage.ask(key, "hi")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["type"] == "server_error"
    ended = own_stage.post("/rl/end_session", {}, key).json()
    assert ended["replicas_serving"] == 0, "its driver blames no agent for that"
    own_stage.route_to(own_stage.sglang.url)
    _, key = own_stage.open_session()
    own_stage.sglang.script = lambda request: Script(gate=threading.Event())
    assert own_stage.ask(key, "hi").status_code == 504
    assert own_stage.post("/rl/end_session", {}, key).json()["replicas_serving"] == 1


def test_a_session_stays_with_its_replica_and_leaves_it_when_it_dies(stage: Stage) -> None:
    second = ScriptedSGLang(stage.tokenizer)
    stage.loop.run(second.start())
    stage.route_to(stage.sglang.url, second.url)
    _, key = stage.open_session()
    for turn in range(3):
        assert stage.ask(key, f"turn {turn}").status_code == 200
    (home,) = (server for server in (stage.sglang, second) if server.requests)
    other = second if home is stage.sglang else stage.sglang
    home.script = lambda request: Script(fault="hang_up")
    stage.relay.replicas = [replica for replica in stage.relay.replicas if replica.url == other.url]
    assert stage.ask(key, "after").status_code == 200
    assert len(other.requests) == 1
    stage.loop.run(second.stop())


def test_the_journal_is_private_and_per_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(stage.journal_dir))
    job = ProxyJobConfig.model_validate(stage.config)
    path = make_journal_path(job, stage.admin_key)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert make_journal_path(job, "the next run's secret") != path

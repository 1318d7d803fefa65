"""`areal-hpc proxy` records in front of any SGLang server, without a run."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from areal_hpc.cli.main import main
from areal_hpc.jobs.node import find_own_address
from tests.support.chatml import byte_level_tokenizer, write_model_dir
from tests.support.deadlines import scaled
from tests.support.lone_proxy import LoneProxy
from tests.support.scripted_sglang import LoopThread, Script, ScriptedSGLang
from tests.support.waiting import wait_for

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture(scope="module")
def servers(loop: LoopThread) -> Iterator[list[ScriptedSGLang]]:
    servers = [ScriptedSGLang(byte_level_tokenizer()) for _ in range(2)]
    for server in servers:
        loop.run(server.start())
    yield servers
    for server in servers:
        loop.run(server.stop())


@pytest.fixture(scope="module")
def started(
    servers: list[ScriptedSGLang], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoneProxy]:
    urls = [server.url for server in servers]
    with closing(LoneProxy(tmp_path_factory.mktemp("lone"), *urls)) as proxy:
        yield proxy


@pytest.fixture
def proxy(started: LoneProxy, servers: list[ScriptedSGLang]) -> LoneProxy:
    """Start a proxy in front of two servers."""
    for server in servers:
        server.script = lambda request: Script()
        server.requests.clear()
    wait_for(lambda: replicas_serving(started) == 2)
    return started


def replicas_serving(proxy: LoneProxy) -> int:
    return int(httpx.get(f"{proxy.url}/healthz").json()["replicas_serving"])


def asked(servers: Sequence[ScriptedSGLang]) -> list[list[int]]:
    """Return the prompts of the first server, then those of the second."""
    return [request["input_ids"] for server in servers for request in server.requests]


def test_it_records_and_exports_an_agent(proxy: LoneProxy, servers: list[ScriptedSGLang]) -> None:
    assert proxy.key_file.stat().st_mode & 0o777 == 0o600
    assert f"{proxy.url}/rl/start_session" in proxy.welcome
    session_id, key = proxy.open_session()
    with OpenAI(base_url=f"{proxy.url}/v1", api_key=key) as agent:
        reply = agent.chat.completions.create(model="any", messages=HELLO)
    assert reply.choices[0].message.content == "hello world"
    assert proxy.post("/rl/set_reward", {"reward": 1.0}, key).status_code == 200
    assert proxy.post("/rl/end_session", {}, key).status_code == 200
    exported = proxy.post("/export_trajectories", {"session_id": session_id}).json()
    row = exported["interactions"][reply.id]
    assert row["reward"] == 1.0
    (prompt,) = asked(servers)
    assert row["tensor_dict"]["input_ids"][0][: len(prompt)] == prompt
    ref = {"ticket_id": 1, "attempt": 0}
    opened = proxy.post("/rl/start_session", {"task_id": "try", "ref": ref})
    finished = proxy.post("/rl/finish_ticket", {"ref": ref, "session_ids": ["x"]})
    assert [opened.status_code, finished.status_code] == [403, 401]
    assert "opened by its driver alone" in opened.text
    assert "there is no run here" in finished.text


def status_after_kill_9(proxy: LoneProxy) -> int:
    """Return the status of a second turn after a first turn and a kill -9."""
    _, key = proxy.open_session()
    first = proxy.post(CHAT, {"messages": HELLO}, key).json()
    proxy.kill()
    proxy.start()
    turn = [*HELLO, first["choices"][0]["message"], *HELLO]
    return proxy.post(CHAT, {"messages": turn}, key).status_code


def test_without_a_journal_sessions_end_with_the_process(proxy: LoneProxy) -> None:
    assert status_after_kill_9(proxy) == 401


def test_journals_keep_sessions(tmp_path: Path, servers: list[ScriptedSGLang]) -> None:
    servers[0].script = lambda request: Script()
    servers[0].requests.clear()
    journal = ("--journal", str(tmp_path / "journal"))
    with closing(LoneProxy(tmp_path, servers[0].url, arguments=journal)) as proxy:
        assert status_after_kill_9(proxy) == 200
    first, again = asked(servers[:1])
    assert again[: len(first)] == first


def test_it_waits_for_its_upstream_and_ends_after_calls(tmp_path: Path, loop: LoopThread) -> None:
    late = ScriptedSGLang(byte_level_tokenizer())
    loop.run(late.start())
    port = int(late.url.rpartition(":")[2])
    loop.run(late.stop())
    with closing(LoneProxy(tmp_path, late.url)) as proxy, ThreadPoolExecutor(1) as agent:
        assert replicas_serving(proxy) == 0
        wait_for(lambda: f"no server answers at {late.url} yet" in proxy.log.read_text())
        _, key = proxy.open_session()
        call = agent.submit(proxy.post, CHAT, {"messages": HELLO}, key)
        time.sleep(0.5)
        loop.run(late.start(port))
        assert call.result(scaled(60)).status_code == 200
        late.script = lambda request: Script(delay_s=1.0)
        call = agent.submit(proxy.post, CHAT, {"messages": HELLO}, key)
        wait_for(lambda: len(late.requests) == 2)
        proxy.process.send_signal(signal.SIGTERM)
        assert call.result(scaled(60)).status_code == 200
        assert proxy.process.wait(scaled(60)) == 0
        with pytest.raises(httpx.ConnectError):
            proxy.post("/rl/start_session", {"task_id": "late"})
    loop.run(late.stop())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--set", "max_session=3"), "proxy.max_session"),
        (("--upstream", "localhost:30000"), "http://host:30000"),
        (("--upstream", "http://me:secret@localhost:30000"), "no user or password"),
        (("--tokenizer", "/nonexistent"), "no chat template"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], complaint: str
) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    command = ["proxy", "--port", "0", "--upstream", "http://127.0.0.1:1"]
    command += ["--tokenizer", str(model_dir), "--admin-key-file", str(tmp_path / "key")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--context-length", "64", *arguments])
    output = capsys.readouterr()
    assert (ended.value.code, output.out) == (78, "")
    assert complaint in output.err


def test_metrics_need_a_key_where_others_reach_them(tmp_path: Path) -> None:
    host = find_own_address("", os.environ)
    if host.startswith("127."):
        pytest.skip("this machine has no address but loopback")
    with closing(LoneProxy(tmp_path, "http://127.0.0.1:9", arguments=("--host", host))) as proxy:
        url = f"{proxy.url}/metrics"
        assert httpx.get(url, trust_env=False).status_code == 401
        key = {"authorization": f"Bearer {proxy.key_file.read_text().strip()}"}
        assert "areal_hpc_proxy_sessions" in httpx.get(url, headers=key, trust_env=False).text

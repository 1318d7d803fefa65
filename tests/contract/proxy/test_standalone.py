"""`areal-hpc proxy`: the recorder in front of any SGLang server, without a run."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

from areal_hpc.cli.main import main
from tests.support.chatml import byte_level_tokenizer, write_model_dir
from tests.support.lone_proxy import LoneProxy
from tests.support.scripted_sglang import LoopThread, Script, ScriptedSGLang

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


Lone = Callable[..., LoneProxy]


@pytest.fixture
def lone() -> Iterator[Lone]:
    """Starts proxies, and leaves none behind."""
    started: list[LoneProxy] = []

    def start(folder: Path, *urls: str, arguments: Sequence[str] = ()) -> LoneProxy:
        started.append(LoneProxy(folder, *urls, arguments=arguments))
        return started[-1]

    yield start
    for proxy in started:
        proxy.kill()


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.stop()


@pytest.fixture
def sglang(loop: LoopThread) -> Iterator[ScriptedSGLang]:
    server = ScriptedSGLang(byte_level_tokenizer())
    loop.run(server.start())
    yield server
    loop.run(server.stop())


def test_it_records_what_an_agent_says_exports_it_and_knows_no_tickets(
    tmp_path: Path, lone: Lone, sglang: ScriptedSGLang
) -> None:
    proxy = lone(tmp_path, sglang.url)
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
    prompt = sglang.requests[0]["input_ids"]
    assert row["tensor_dict"]["input_ids"][0][: len(prompt)] == prompt
    ref = {"ticket_id": 1, "attempt": 0}
    opened = proxy.post("/rl/start_session", {"task_id": "try", "ref": ref})
    finished = proxy.post("/rl/finish_ticket", {"ref": ref, "session_ids": ["x"]})
    assert [opened.status_code, finished.status_code] == [404, 404]
    assert "no tickets" in opened.text
    proxy.stop()


def test_with_a_journal_sessions_go_on_after_kill_9_and_without_one_they_end(
    tmp_path: Path, lone: Lone, sglang: ScriptedSGLang
) -> None:
    for name, arguments, status in (
        ("kept", ("--journal", str(tmp_path / "journal")), 200),
        ("lost", (), 401),
    ):
        (tmp_path / name).mkdir()
        proxy = lone(tmp_path / name, sglang.url, arguments=arguments)
        _, key = proxy.open_session()
        first = proxy.post("/v1/chat/completions", {"messages": HELLO}, key).json()
        proxy.kill()
        proxy.start()
        turn = [*HELLO, first["choices"][0]["message"], *HELLO]
        answer = proxy.post("/v1/chat/completions", {"messages": turn}, key)
        assert answer.status_code == status, answer.text
        proxy.stop()
    first, again, _ = (request["input_ids"] for request in sglang.requests)
    assert again[: len(first)] == first


def test_a_stop_signal_lets_open_calls_end_and_takes_no_new_ones(
    tmp_path: Path, lone: Lone, sglang: ScriptedSGLang
) -> None:
    proxy = lone(tmp_path, sglang.url)
    _, key = proxy.open_session()
    sglang.script = lambda request: Script(delay_s=1.0)
    with ThreadPoolExecutor(1) as agent:
        call = agent.submit(proxy.post, "/v1/chat/completions", {"messages": HELLO}, key)
        while not sglang.requests:
            time.sleep(0.01)
        proxy.process.send_signal(signal.SIGTERM)
        assert call.result(60).status_code == 200
    assert proxy.process.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        proxy.post("/rl/start_session", {"task_id": "late"})
    proxy.stdout.close()


def test_it_waits_for_an_upstream_that_is_not_there_yet(
    tmp_path: Path, lone: Lone, loop: LoopThread
) -> None:
    late = ScriptedSGLang(byte_level_tokenizer())
    loop.run(late.start())
    url = late.url
    loop.run(late.stop())
    proxy = lone(tmp_path, url)
    assert httpx.get(f"{proxy.url}/healthz").json()["replicas_serving"] == 0
    _, key = proxy.open_session()
    port = int(url.rpartition(":")[2])
    threading.Timer(0.5, lambda: loop.run(late.start(port))).start()
    assert proxy.post("/v1/chat/completions", {"messages": HELLO}, key).status_code == 200
    proxy.stop()
    loop.run(late.stop())


def test_a_stream_goes_on_at_another_upstream(
    tmp_path: Path, lone: Lone, loop: LoopThread, sglang: ScriptedSGLang
) -> None:
    other = ScriptedSGLang(byte_level_tokenizer())
    loop.run(other.start())
    proxy = lone(tmp_path, sglang.url, other.url)
    while httpx.get(f"{proxy.url}/healthz").json()["replicas_serving"] < 2:
        time.sleep(0.02)
    scripts = iter([Script("hello world the quick", fault="late_hang_up:3"), Script(" brown fox")])
    for server in (sglang, other):
        server.script = lambda request: next(scripts)
    _, key = proxy.open_session()
    with OpenAI(base_url=f"{proxy.url}/v1", api_key=key) as agent:
        chunks = [*agent.chat.completions.create(model="any", messages=HELLO, stream=True)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    (first,), (second,) = sglang.requests, other.requests
    assert len(second["input_ids"]) == len(first["input_ids"]) + 3
    proxy.stop()
    loop.run(other.stop())


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
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    complaint: str,
) -> None:
    model_dir = write_model_dir(tmp_path / "model")
    command = ["proxy", "--port", "0", "--upstream", "http://127.0.0.1:1"]
    command += ["--tokenizer", str(model_dir), "--admin-key-file", str(tmp_path / "key")]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--context-length", "64", *arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (78, "")
    assert complaint in said.err

"""A bad call or a broken parser fails alone and moves no session of other agents."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from areal_hpc.errors import ParserLostError, ProxyRequestError
from areal_hpc.proxy.engine import tool_parsers
from areal_hpc.proxy.engine.model_call import ReplyContent
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.wire.parsers import ToolGrammarRequest
from areal_hpc.wire.replicas import ReplicaView
from tests.contract.proxy.talk import counted
from tests.support.commands import write_program
from tests.support.deadlines import scaled
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script, ScriptedSGLang
from tests.support.waiting import wait_for

POISON = "poison"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Start a stage without sessions of other tests."""
    stage = Stage(tmp_path_factory.mktemp("bad_calls"))
    yield stage
    stage.close()


@pytest.fixture(scope="module")
def servers(stage: Stage) -> Iterator[list[ScriptedSGLang]]:
    """Start three servers, the stage's own first."""
    others = [ScriptedSGLang(stage.tokenizer) for _ in range(2)]
    for server in others:
        stage.loop.run(server.start())
    yield [stage.sglang, *others]
    for server in others:
        stage.loop.run(server.stop())


def serve(stage: Stage, *servers: ScriptedSGLang) -> None:
    """Make these servers, and only these, known to the proxy."""
    stage.relay.replicas = [
        ReplicaView(index, 1, "serving", server.url, "1.0") for index, server in enumerate(servers)
    ]
    stage.await_polls()
    health = f"{stage.url}/healthz"
    wait_for(lambda: stage.http.get(health).json()["replicas_serving"] == len(servers))
    for server in servers:
        server.script = lambda request: Script()
        server.requests.clear()


def poison(stage: Stage, fault: str, *servers: ScriptedSGLang) -> None:
    """Make the servers fail in this way at calls that contain the word."""
    for server in servers:
        server.script = lambda request: Script(
            fault=fault if POISON in stage.prompt_of(request) else ""
        )


@pytest.mark.parametrize("stream", [False, True])
def test_an_engines_error_is_answered_after_three_tries(
    stage: Stage, key: str, servers: list[ScriptedSGLang], stream: bool
) -> None:
    serve(stage, *servers[:2])
    homes = {}
    for _ in range(6):
        _, other = stage.open_session()
        stage.ask(other, "hi")
        (homes[other],) = (server for server in servers[:2] if server.requests)
        homes[other].requests.clear()
    assert {*map(id, homes.values())} == {*map(id, servers[:2])}
    poison(stage, "500", *servers[:2])
    before = counted(stage, "failed_calls_total")
    answer = stage.ask(key, POISON, stream=stream)
    assert answer.status_code == 502
    assert "3 tries of this call failed" in answer.text
    assert "boom" in answer.text
    assert answer.headers["x-should-retry"] == "false"
    assert sum(len(server.requests) for server in servers[:2]) == 3
    assert counted(stage, "failed_calls_total") == before + 1
    for other, home in homes.items():
        for server in servers[:2]:
            server.requests.clear()
        assert stage.ask(other, "again").status_code == 200
        assert [server for server in servers[:2] if server.requests] == [home], "it moved"


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        (Script(fault="garbage"), "unexpected reply"),
        (Script(versions=[("1.0", 0, 2)]), "cover only 2 tokens"),
        (Script(versions=[("unset", 0, 5)]), "unset"),
    ],
)
def test_unsound_replies_are_answered_after_three_tries(
    stage: Stage, key: str, servers: list[ScriptedSGLang], script: Script, problem: str
) -> None:
    serve(stage, *servers[:2])
    for server in servers[:2]:
        server.script = lambda request: script
    answer = stage.ask(key, "hi")
    assert answer.status_code == 502
    assert "3 tries of this call failed" in answer.text
    assert problem in answer.text
    assert sum(len(server.requests) for server in servers[:2]) == 3


def test_what_engines_die_of_reaches_two_of_them(
    stage: Stage, key: str, servers: list[ScriptedSGLang]
) -> None:
    serve(stage, *servers)
    poison(stage, "hang_up", *servers)
    answer = stage.ask(key, POISON)
    assert answer.status_code == 502
    assert "2 replicas hung up on this call" in answer.text
    assert sorted(len(server.requests) for server in servers) == [0, 1, 1]


def test_sessions_that_start_are_spread(own_stage: Stage, servers: list[ScriptedSGLang]) -> None:
    first, second = own_stage.sglang, servers[1]
    serve(own_stage, first, second)
    keys = [own_stage.open_session()[1] for _ in range(16)]
    for key in keys:
        assert own_stage.ask(key, "a title").status_code == 200
    assert (len(first.requests), len(second.requests)) == (8, 8)
    for key in keys:
        assert own_stage.ask(key, "the task").status_code == 200
    assert (len(first.requests), len(second.requests)) == (16, 16), "they stay"


def test_refusals_are_counted_and_logged_once_a_client(stage: Stage, key: str) -> None:
    headers = {"user-agent": "sparkle-cli/2.1"}
    body = {"messages": [{"role": "user", "content": "hi"}], "temprature": 1}
    pattern = r'areal_hpc_proxy_refusals_total\{route="/chat/completions",status="400"\} (\d+)'

    def count() -> int:
        match = re.search(pattern, stage.http.get(f"{stage.url}/metrics").text)
        return int(match[1]) if match else 0

    before = count()
    for _ in range(3):
        answer = stage.post("/v1/chat/completions", body, key, headers)
        assert answer.status_code == 400
    assert count() == before + 3
    line = "/chat/completions: client 'sparkle-cli/2.1' gets status 400 for 'temprature'"
    assert stage.log.count(line) == 1


PATIENCE_S = scaled(60.0)
BROKEN = """
echo started >> "$0.starts"
echo '{}'
read -r request
echo 'Traceback of something'
exec cat > /dev/null
"""
STUCK = """
echo started >> "$0.starts"
echo '{}'
exec sleep 600
"""
SLOW = """
echo $$ >> "$0.starts"
exec sleep 600
"""


def read_starts(program: Path) -> list[str]:
    starts = program.with_name("python.starts")
    return starts.read_text().splitlines() if starts.exists() else []


@pytest.mark.asyncio
async def test_calls_do_not_wait_for_a_parser_process_that_went_wrong(tmp_path: Path) -> None:
    program = write_program(tmp_path / "python", BROKEN)
    parsers = ParserProcessClient(str(program), "qwen", None)
    try:
        for _ in range(2):
            request = ToolGrammarRequest(parsers.allocate_id(), [], "", True, None, True)
            with pytest.raises(ParserLostError):
                await asyncio.wait_for(parsers.send_request(request), PATIENCE_S)
    finally:
        await parsers.close()
    assert len(read_starts(program)) == 2


@pytest.mark.asyncio
async def test_a_text_that_parsers_find_no_end_with_is_kept_as_it_is(tmp_path: Path) -> None:
    program = write_program(tmp_path / "python", STUCK)
    parsers = ParserProcessClient(str(program), "qwen", None, answer_timeout_s=0.6)
    try:
        parser = parsers.build_reply_parser([], "")
        content = await asyncio.wait_for(parser.feed("[f(a=1, ", is_last=True), PATIENCE_S)
        assert content == ReplyContent("[f(a=1, ")
        streamed = parsers.build_reply_parser([], "")
        with pytest.raises(ProxyRequestError, match=r"took longer than 0\.6 s"):
            await asyncio.wait_for(streamed.feed("[f("), PATIENCE_S)
    finally:
        await parsers.close()
    assert len(read_starts(program)) == 2, "the text was not given to another process"


def test_a_client_that_leaves_while_parsers_start_leaves_no_process(tmp_path: Path) -> None:
    program = write_program(tmp_path / "python", SLOW)

    async def start_and_leave() -> None:
        parsers = ParserProcessClient(str(program), "qwen", None)
        starting = asyncio.ensure_future(parsers.start())
        async with asyncio.timeout(PATIENCE_S):
            while not (pids := read_starts(program)):
                await asyncio.sleep(0.01)
            starting.cancel()
            await asyncio.wait([starting])
            while Path(f"/proc/{pids[0]}").exists():
                await asyncio.sleep(0.01)

    uvloop.run(start_and_leave())  # the proxy does so too


@pytest.mark.parametrize(
    ("text", "problem"),
    [("exit 3", "ended at their start"), (SLOW, "did not start within 0.2 s")],
)
def test_parsers_that_do_not_start_say_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setattr(tool_parsers, "START_TIMEOUT_S", 0.2 if text is SLOW else PATIENCE_S)
    program = write_program(tmp_path / "python", text)
    parsers = ParserProcessClient(str(program), "qwen", None)
    with pytest.raises(ParserLostError, match=problem):
        uvloop.run(parsers.start())

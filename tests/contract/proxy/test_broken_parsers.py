"""A parser process that goes wrong fails the calls that wait, and is replaced."""

import asyncio
from pathlib import Path

import pytest
import uvloop

from areal_hpc.errors import ParserLostError, ProxyRequestError
from areal_hpc.proxy.engine import tool_parsers
from areal_hpc.proxy.engine.model_call import ReplyContent
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.wire.parsers import ToolGrammarRequest
from tests.support.deadlines import scaled

PATIENCE_S = scaled(60.0)
BROKEN = """#!/bin/sh
echo started >> "$0.starts"
echo '{}'
read -r request
echo 'Traceback of something'
exec cat > /dev/null
"""
STUCK = """#!/bin/sh
echo started >> "$0.starts"
echo '{}'
exec sleep 600
"""
SLOW = """#!/bin/sh
echo $$ >> "$0.starts"
exec sleep 600
"""


def write_program(folder: Path, text: str) -> Path:
    """What is started in place of SGLang's Python."""
    program = folder / "python"
    program.write_text(text)
    program.chmod(0o700)
    return program


def read_starts(program: Path) -> list[str]:
    starts = program.with_name("python.starts")
    return starts.read_text().splitlines() if starts.exists() else []


def test_calls_do_not_wait_for_a_parser_process_that_went_wrong(tmp_path: Path) -> None:
    program = write_program(tmp_path, BROKEN)

    async def ask_twice() -> None:
        parsers = ParserProcessClient(str(program), "qwen", None)
        try:
            for _ in range(2):
                request = ToolGrammarRequest(parsers.allocate_id(), [], "", True, None, True)
                with pytest.raises(ParserLostError):
                    await asyncio.wait_for(parsers.ask(request), PATIENCE_S)
        finally:
            await parsers.close()

    asyncio.run(ask_twice())
    assert len(read_starts(program)) == 2


def test_a_text_that_parsers_find_no_end_with_is_kept_as_it_is(tmp_path: Path) -> None:
    program = write_program(tmp_path, STUCK)

    async def read_whole_then_streamed() -> None:
        parsers = ParserProcessClient(str(program), "qwen", None, answer_timeout_s=0.6)
        try:
            whole = parsers.build_reply_parser([], "")
            said = await asyncio.wait_for(whole.feed("[f(a=1, ", is_last=True), PATIENCE_S)
            assert said == ReplyContent("[f(a=1, ")
            streamed = parsers.build_reply_parser([], "")
            with pytest.raises(ProxyRequestError, match=r"took longer than 0\.6 s"):
                await asyncio.wait_for(streamed.feed("[f("), PATIENCE_S)
        finally:
            await parsers.close()

    asyncio.run(read_whole_then_streamed())
    assert len(read_starts(program)) == 2, "the text was not given to another process"


def test_a_client_that_leaves_while_parsers_start_leaves_no_process(tmp_path: Path) -> None:
    program = write_program(tmp_path, SLOW)

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

    uvloop.run(start_and_leave())  # as the proxy does


@pytest.mark.parametrize(
    ("text", "problem"),
    [("#!/bin/sh\nexit 3\n", "ended at their start"), (SLOW, "did not start within 0.2 s")],
)
def test_parsers_that_do_not_start_say_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setattr(tool_parsers, "START_TIMEOUT_S", 0.2 if text is SLOW else PATIENCE_S)
    parsers = ParserProcessClient(str(write_program(tmp_path, text)), "qwen", None)
    with pytest.raises(ParserLostError, match=problem):
        uvloop.run(parsers.start())

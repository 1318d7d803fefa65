"""A parser process that writes what is no reply fails the calls that wait, and is replaced."""

import asyncio
from pathlib import Path

import pytest

from areal_hpc.errors import ParserLostError
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.wire.parsers import ToolGrammarRequest

PATIENCE_S = 60.0
BROKEN = """#!/bin/sh
echo started >> "$0.starts"
echo '{}'
read -r request
echo 'Traceback of something'
exec cat > /dev/null
"""


def test_calls_do_not_wait_for_a_parser_process_that_went_wrong(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(BROKEN)
    python.chmod(0o700)

    async def ask_twice() -> None:
        parsers = ParserProcessClient(str(python), "qwen", None)
        try:
            for _ in range(2):
                request = ToolGrammarRequest(parsers.allocate_id(), [], "", True, None, True)
                with pytest.raises(ParserLostError):
                    await asyncio.wait_for(parsers.send_request(request), PATIENCE_S)
        finally:
            await parsers.close()

    asyncio.run(ask_twice())
    starts = python.with_name("python.starts").read_text().splitlines()
    assert len(starts) == 2

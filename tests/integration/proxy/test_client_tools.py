"""Clients in a process share one process of SGLang's parsers, and get tool calls taken apart."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.client.in_process_engine import get_shared_parsers
from tests.integration.proxy.test_tool_calls import CALL, CHAT_TOOL, QUESTION, THOUGHT
from tests.support.chatml import byte_level_tokenizer, write_model_dir
from tests.support.deadlines import scaled
from tests.support.process_commands import command_of
from tests.support.scripted_sglang import Script, ScriptedSGLang


def count_parser_processes() -> int:
    """Of this process: those of proxies are not its children."""
    return sum(
        "areal_hpc.inference.parser_process" in command_of(child)
        for child in psutil.Process().children()
    )


def test_clients_share_the_parsers_of_their_formats(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path / "model")

    async def ask(url: str) -> Any:
        client = ArealOpenAI(url, model_dir, tool_call_parser="qwen25", reasoning_parser="qwen3")
        create = client.chat.completions.create
        reply = await create(
            model="m", messages=QUESTION, tools=[CHAT_TOOL], tool_choice="required"
        )
        await client.close()
        (row,) = client.export_interactions().values()
        return reply.choices[0], row.output_message_list[0]

    async def play() -> None:
        said = Script(THOUGHT + CALL)
        server = ScriptedSGLang(byte_level_tokenizer(), lambda request: said)
        await server.start()
        for choice, recorded in await asyncio.gather(ask(server.url), ask(server.url)):
            (call,) = choice.message.tool_calls
            assert json.loads(call.function.arguments) == {"x": 3, "y": 4}
            assert choice.finish_reason == "tool_calls"
            assert choice.message.reasoning_content == "add them"
            assert recorded["tool_calls"][0]["function"]["name"] == "add"
        assert "structural_tag" in server.requests[0]["sampling_params"]
        assert count_parser_processes() == 1
        parsers = get_shared_parsers("qwen25", "qwen3", "auto")
        assert parsers is not None
        await parsers.close()
        await server.stop()

    asyncio.run(asyncio.wait_for(play(), scaled(100)))

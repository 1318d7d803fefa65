"""SGLang's compiler and parsers run in separate processes: costly grammars, clients' calls."""

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_hpc.client.areal_openai import ArealOpenAI
from areal_hpc.client.in_process_engine import get_shared_parsers
from tests.integration.proxy.tool_questions import CALL, CHAT_TOOL, QUESTION, THOUGHT
from tests.support.chatml import byte_level_tokenizer, write_model_dir
from tests.support.deadlines import scaled
from tests.support.process_commands import command_of
from tests.support.proxy_stage import Stage
from tests.support.scripted_sglang import Script, ScriptedSGLang
from tests.support.thoroughness import choose


def nest(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def double(levels: int) -> dict[str, Any]:
    """Build rules that each refer twice to the next, and the last one to the first."""
    definitions: dict[str, Any] = {"n0": {"anyOf": [{"$ref": f"#/$defs/n{levels}"}, {}]}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/n{level - 1}"}
        definitions[f"n{level}"] = {"type": "object", "properties": {"a": below, "b": below}}
    return {"$defs": definitions, "$ref": f"#/$defs/n{levels}"}


def strings(count: int) -> dict[str, Any]:
    fields = {f"p{index}": {"type": "string", "maxLength": 100} for index in range(count)}
    return {"type": "object", "properties": fields}


USUAL: list[tuple[str, str]] = [
    ("regex", r"(?:\d{4}-\d{2}-\d{2})(?:T\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"),
    ("regex", r"[?*+{}]" * 200 + r"\?\*\{5000\}"),
    ("regex", r"(yes|no|maybe)( [a-z]{1,20}){0,40}"),
    ("ebnf", "root ::= (" + " | ".join(f'"w?*{index}"' for index in range(1000)) + ")*"),
    ("ebnf", 'root ::= "{5000}" [?*+"] expr\nexpr ::= term (("+" | "-") term)*\nterm ::= [0-9]+'),
    ("json_schema", json.dumps(nest(30))),
    ("json_schema", json.dumps(double(5))),
    ("json_schema", json.dumps(strings(32))),
    ("json_schema", '{"properties": {"pattern": {"pattern": "^[A-Z]{3}-[0-9]{4,8}$"}}}'),
    ("json_schema", '{"enum": ["a{0,9999}", "%s"]}' % ("?" * 500)),
]


COSTLY = "root ::= root root | [a-z ]"
"""Each of its tokens takes longer than the one before it, by the cube."""


@pytest.mark.parametrize(("kind", "text"), choose(USUAL, USUAL[2], USUAL[6]))
def test_a_usual_grammar_reaches_a_replica(stage: Stage, kind: str, text: str) -> None:
    stage.sglang.script = lambda request: Script()
    stage.sglang.requests.clear()
    schema = {"name": "a", "schema": json.loads(text)} if kind == "json_schema" else None
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    answer = stage.ask(stage.open_session()[1], "hi", **(form if schema else {kind: text}))
    assert answer.status_code == 200, answer.text
    (request,) = stage.sglang.requests
    assert kind in request["sampling_params"]


@pytest.mark.parametrize("route", choose(["/generate", "/chat/completions"], "/chat/completions"))
def test_a_costly_grammar_is_refused(stage: Stage, route: str) -> None:
    stage.sglang.requests.clear()
    bodies: dict[str, Any] = {
        "/generate": {"input_ids": [5], "sampling_params": {"ebnf": COSTLY}},
        "/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "ebnf": COSTLY},
    }
    answer = stage.post(route, bodies[route], stage.open_session()[1])
    while answer.status_code == 503:  # a busy machine needs more than a minute: ask again
        answer = stage.post(route, bodies[route], stage.open_session()[1])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ebnf")
    assert "the grammar takes too long to compile" in answer.json()["error"]["message"]
    assert stage.sglang.requests == []


def count_parser_processes() -> int:
    """Count the parser processes of this process; those of proxies are not its children."""
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
        reply = Script(THOUGHT + CALL)
        server = ScriptedSGLang(byte_level_tokenizer(), lambda request: reply)
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

"""Relay before a real SGLang, which is made to say what the test wants by a grammar."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientSession, ClientTimeout, web

from tests.support.scripted_sglang import start_web_app


@dataclass(frozen=True)
class EngineCall:
    """What the engine read and said."""

    prompt: list[int]
    reply: list[int]
    said: str
    """What it was made to say."""


class ForcingRelay:
    """Stands between a proxy and SGLang; all but what is said is SGLang's own."""

    def __init__(self, upstream: str, choose_reply: Callable[[list[int]], str]) -> None:
        self._upstream, self._choose_reply = upstream, choose_reply
        self.calls: list[EngineCall] = []
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._client = ClientSession(self._upstream, timeout=ClientTimeout(None))
        self._runner, self.url = await start_web_app(app)

    async def stop(self) -> None:
        await self._runner.cleanup()
        await self._client.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/generate":
            return await self._generate(request, json.loads(body))
        async with self._client.request(request.method, request.path_qs, data=body) as answer:
            kind = answer.content_type
            return web.Response(body=await answer.read(), status=answer.status, content_type=kind)

    async def _generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        said = self._choose_reply(body["input_ids"])
        sampling = body["sampling_params"]
        for name in ("regex", "json_schema", "structural_tag"):
            sampling.pop(name, None)
        sampling["ebnf"] = f"root ::= {json.dumps(said)}"
        reply: list[int] = []
        # Before the end, which the proxy does not wait for: it hangs up when it has the last token.
        self.calls.append(EngineCall(body["input_ids"], reply, said))
        async with self._client.post("/generate", json=body) as answer:
            passed = web.StreamResponse(status=answer.status)
            passed.content_type = answer.content_type
            await passed.prepare(request)
            if not body.get("stream"):
                whole = await answer.read()
                reply += json.loads(whole).get("output_ids", [])
                await passed.write(whole)
            else:
                async for line in answer.content:  # each event is one line
                    reply += _read_output_ids(line)
                    await passed.write(line)
        return passed


def _read_output_ids(line: bytes) -> list[int]:
    """The new tokens of an event of SGLang's incremental streams."""
    content = line.removeprefix(b"data: ").strip()
    if not content or content == b"[DONE]":
        return []
    ids: list[int] = json.loads(content).get("output_ids", [])
    return ids

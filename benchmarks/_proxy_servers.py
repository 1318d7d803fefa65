"""Servers that the proxy is measured between and against.

`python -m benchmarks._proxy_servers NAME WHAT REPLY_S`, where NAME and WHAT are

- upstream ANSWERS: says the same reply to everybody, as SGLang's `/generate` and as a chat
  completion, with log-probabilities or without; from memory, without reading what it is asked, and
  after REPLY_S.
- relay URL: the floor. The same server and client libraries as the proxy (uvicorn's ASGI, aiohttp),
  passing bytes on.

Each prints the port that it listens on.
"""

import asyncio
import json
import random
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, cast

import aiohttp
import uvicorn
import uvloop

Message = MutableMapping[str, Any]


class Answers:
    """The bodies that the upstream sends."""

    def __init__(self, text: str, ids: list[int], tokens: list[str]) -> None:
        rng = random.Random(0)
        logprobs = [-rng.expovariate(1.5) for _ in ids]
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": 1000,
            "weight_version": "1.0",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[p, i, None] for p, i in zip(logprobs, ids, strict=True)],
            "output_token_logprobs_length": len(ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_versions": [{"version": "1.0", "start": 0, "end": len(ids)}],
            "e2e_latency": 0.01,
        }
        usage = {"prompt_tokens": 1000, "completion_tokens": len(ids), "total_tokens": 1256}
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": "stop",
        }
        chat = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "bench",
            "choices": [choice],
            "usage": usage,
        }
        content = [
            {"token": token, "logprob": p, "bytes": list(token.encode()), "top_logprobs": []}
            for token, p in zip(tokens, logprobs, strict=True)
        ]
        spelled = {**chat, "choices": [{**choice, "logprobs": {"content": content}}]}
        generated = {"text": text, "output_ids": ids, "meta_info": meta}
        self.by_name = {"generate": generated, "chat": chat, "chat_logprobs": spelled}

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.by_name))
        return path


class _Upstream(asyncio.Protocol):
    answers: dict[str, bytes]
    reply_s: float

    def __init__(self) -> None:
        self._received = bytearray()
        self._whole_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._whole_bytes:
            head, separator, _ = self._received.partition(b"\r\n\r\n")
            if not separator:
                return
            length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            self._whole_bytes = len(head) + 4 + int(length or 0)
        if len(self._received) < self._whole_bytes:
            return
        if self._received.startswith(b"POST /generate"):
            name = "generate"
        elif self._received.startswith(b"GET"):
            name = "nothing"
        elif self._received.find(b'"logprobs":', -200) > 0 or b'"logprobs": ' in self._received:
            name = "chat_logprobs"
        else:
            name = "chat"
        self._received, self._whole_bytes = bytearray(), 0
        if self.reply_s == 0:
            self._transport.write(self.answers[name])
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(self.reply_s, self._transport.write, self.answers[name])


async def upstream(answers: Path, reply_s: float) -> None:
    """Answer until killed."""
    bodies = {
        name: json.dumps(body).encode() for name, body in json.loads(answers.read_text()).items()
    }
    bodies["nothing"] = b"{}"
    _Upstream.answers = {
        name: b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(body), body)
        for name, body in bodies.items()
    }
    _Upstream.reply_s = reply_s
    server = await asyncio.get_running_loop().create_server(_Upstream, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def relay(url: str) -> None:
    """Pass requests on to the upstream's `/generate` until killed."""
    async with aiohttp.ClientSession(
        headers={"content-type": "application/json"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    ) as http:

        async def app(
            scope: Message,
            receive: Callable[[], Awaitable[Message]],
            send: Callable[[Message], Awaitable[None]],
        ) -> None:
            body, more = b"", True
            while more:
                part = await receive()
                body += part["body"]
                more = part["more_body"]
            async with http.post(f"{url}/generate", data=body) as answer:
                content = await answer.read()
            length = (b"content-length", str(len(content)).encode())
            await send(
                {"type": "http.response.start", "status": answer.status, "headers": [length]}
            )
            await send({"type": "http.response.body", "body": content})

        listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(
            app,
            loop="none",
            http="httptools",
            lifespan="off",
            access_log=False,
            log_config=None,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    name, argument, reply_s = sys.argv[1:]
    what = upstream(Path(argument), float(reply_s)) if name == "upstream" else relay(argument)
    uvloop.run(what)

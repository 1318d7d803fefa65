"""Chromium by its DevTools protocol, and the server of `areal-hpc view` whose pages it opens."""

import asyncio
import base64
import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.commands import start_areal_hpc
from tests.support.deadlines import scaled

COMMAND_TIMEOUT_S = 60.0
POLL_S = 0.1
KEY_CODES = {
    **{"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36},
    **{"ArrowLeft": 37, "ArrowRight": 39},
}


class Page:
    """A tab, which keeps its requests and the errors of its console."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._listener = asyncio.create_task(self._listen())
        self.errors: list[str] = []
        self.requests: list[str] = []

    async def _listen(self) -> None:
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._replies.pop(content["id"]).set_result(content)
            elif content["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(content["params"]["exceptionDetails"])[:500])
            elif content["method"] == "Log.entryAdded":
                entry = content["params"]["entry"]
                if entry["level"] == "error":
                    self.errors.append(f"{entry['text']} {entry.get('url', '')}")
            elif content["method"] == "Network.requestWillBeSent":
                self.requests.append(content["params"]["request"]["url"])

    async def command(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        reply = asyncio.get_running_loop().create_future()
        self._replies[self._number] = reply
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        content = await asyncio.wait_for(reply, scaled(COMMAND_TIMEOUT_S))
        assert "error" not in content, content
        result: dict[str, Any] = content["result"]
        return result

    async def start(self) -> None:
        for domain in ("Runtime", "Log", "Network", "Page"):
            await self.command(f"{domain}.enable")

    async def resize(self, width: int, height: int) -> None:
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    async def prefer_colors(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.command("Emulation.setEmulatedMedia", features=[feature])

    async def open(self, address: str) -> None:
        await self.command("Page.navigate", url=address)

    async def ask(self, expression: str) -> Any:
        answer = await self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def await_true(
        self, expression: str, timeout_s: float = 60.0, *, poll_s: float = POLL_S
    ) -> None:
        async with asyncio.timeout(scaled(timeout_s)):
            while not await self.ask(expression):
                await asyncio.sleep(poll_s)

    async def press(self, key: str) -> None:
        text = {} if key in KEY_CODES else {"text": key}
        text |= {"text": "\r"} if key == "Enter" else {}
        code = {"windowsVirtualKeyCode": KEY_CODES.get(key, 0)}
        await self.command("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        await self.command("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    async def photograph(self, path: Path) -> None:
        answer = await self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    async def close(self) -> None:
        self._listener.cancel()
        with suppress(asyncio.CancelledError):
            await self._listener


@asynccontextmanager
async def open_page(folder: Path) -> AsyncIterator[Page]:
    """A tab of a Chromium of its own, whose profile is put into a folder; it may log no error."""
    profile = folder / "chromium"
    process = await asyncio.create_subprocess_exec(
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _await_port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = await answer.json()
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            async with session.ws_connect(address, max_msg_size=1 << 28) as socket:
                page = Page(socket)
                await page.start()
                try:
                    yield page
                    assert page.errors == []
                finally:
                    await page.close()
    finally:
        process.terminate()
        await process.wait()


async def _await_port(file: Path) -> int:
    async with asyncio.timeout(scaled(COMMAND_TIMEOUT_S)):
        while not (file.exists() and (lines := file.read_text().split())):
            await asyncio.sleep(POLL_S)
    return int(lines[0])


def start_view_server(root: Path, environ: Mapping[str, str]) -> tuple[subprocess.Popen[str], str]:
    server = start_areal_hpc("view", root, environ=environ)
    assert server.stdout
    line = server.stdout.readline()
    match = re.search(r"http://\S+", line)
    if match is None:
        server.kill()
        raise AssertionError(f"no address: {line}{server.communicate()[0]}")
    return server, match[0]


@contextmanager
def serving_pages(root: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """The address of a server, which Ctrl-C must then end well."""
    server, url = start_view_server(root, environ)
    try:
        yield url
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=scaled(30))
    assert server.returncode == 0

"""Stage for agents of gyms: a real proxy, SGLang's real parsers, and a scripted model."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.chatml import byte_level_tokenizer
from tests.support.deadlines import scaled
from tests.support.lone_proxy import LoneProxy
from tests.support.scripted_sglang import LoopThread, Script, ScriptedSGLang


class GymStage:
    """Stage whose model writes `lines`, one a call, and then the last one forever."""

    def __init__(
        self,
        folder: Path,
        lines: Sequence[str] = (),
        arguments: Sequence[str] = ("--context-length", "8192"),
        *,
        parser: str = "qwen25",
        incremental: bool = False,
    ) -> None:
        self.tokenizer = byte_level_tokenizer()
        self.prompts: list[str] = []
        self._lines = lines
        self._loop = LoopThread()
        self.server = ScriptedSGLang(self.tokenizer, self._script, incremental=incremental)
        self._loop.run(self.server.start())
        if parser:  # which imports SGLang
            arguments = ("--tool-call-parser", parser, *arguments)
        self.proxy = LoneProxy(folder, self.server.url, arguments=arguments)

    def _script(self, request: dict[str, Any]) -> Script:
        self.prompts.append(self.tokenizer.decode(request["input_ids"], skip_special_tokens=False))
        return Script(self._lines[min(len(self.prompts), len(self._lines)) - 1])

    def play(self, agent: Any, data: dict[str, Any]) -> Any:
        """Play an episode of the agent, and return its result; its processes are ended."""
        _, key = self.proxy.open_session()

        async def run() -> Any:
            async with httpx.AsyncClient(timeout=scaled(60)) as http_client:
                try:
                    return await agent.run(
                        data,
                        base_url=f"{self.proxy.url}/v1",
                        api_key=key,
                        http_client=http_client,
                    )
                finally:
                    if hasattr(agent, "close"):
                        agent.close()

        return asyncio.run(run())

    def close(self) -> None:
        self.proxy.kill()
        self._loop.run(self.server.stop())
        self._loop.stop()


def call_tool(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

"""Worker of `McpAgent`: servers of the Model Context Protocol, by stdio and streamable HTTP."""

import contextlib
import json
import os
from typing import Any

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from worker_loop import Gym, serve

PROXY_VARIABLES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "no_proxy"),
)
"""Variables that a stdio server needs to reach hosts, and that the SDK does not pass to it."""


class McpGym(Gym):
    """Gym with the tools of MCP servers, to which it connects anew for each episode."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._servers = config["servers"]
        self._timeout_s = config["call_timeout_s"]
        self._open = contextlib.AsyncExitStack()
        self._tools: dict[str, tuple[Client, str]] = {}

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        await self.close()
        tools = []
        for server, config in self._servers.items():
            client = Client(
                await self._build_connection_target(config), read_timeout_seconds=self._timeout_s
            )
            await self._open.enter_async_context(client)
            for tool in (await client.list_tools()).tools:
                name = tool.name if len(self._servers) == 1 else f"{server}__{tool.name}"
                self._tools[name] = client, tool.name
                tools.append(build_chat_tool(name, tool))
        return {"text": "", "tools": tools}

    async def _build_connection_target(self, server_config: dict[str, Any]) -> Any:
        if "url" not in server_config:
            command, *arguments = server_config["command"]
            passed = {name: os.environ[name] for name in PROXY_VARIABLES if name in os.environ}
            return StdioServerParameters(
                command=command,
                args=arguments,
                env=passed | (server_config.get("env") or {}),
                cwd=server_config.get("cwd"),
            )
        if "headers" not in server_config:
            return server_config["url"]
        client = await self._open.enter_async_context(
            httpx2.AsyncClient(headers=server_config["headers"])
        )
        return streamable_http_client(server_config["url"], http_client=client)

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        results = [
            {"id": call["id"], "text": await self._call(call["name"], call["arguments"])}
            for call in reply["calls"]
        ]
        return {"results": results, "reward": 0.0, "done": not results}

    async def _call(self, tool_name: str, arguments: str) -> str:
        if tool_name not in self._tools:
            return f"error: there is no tool {tool_name!r}; there are {', '.join(self._tools)}"
        client, own_name = self._tools[tool_name]
        try:
            call_arguments = json.loads(arguments or "{}")
            result = await client.call_tool(own_name, call_arguments)
        except Exception as error:  # boundary: a server may refuse in any way
            return f"error: {error}"
        texts = [block.text for block in result.content if block.type == "text"]
        other_blocks = [f"({block.type})" for block in result.content if block.type != "text"]
        text = "\n".join([*texts, *other_blocks])
        return f"error: {text}" if result.is_error else text

    async def close(self) -> None:
        self._tools.clear()
        await self._open.aclose()


def build_chat_tool(tool_name: str, tool: Any) -> dict[str, Any]:
    function = {
        "name": tool_name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


if __name__ == "__main__":
    serve(McpGym)

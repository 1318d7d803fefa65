"""Worker of `NemoGymAgent`: a resources server of NeMo Gym within this process."""

import importlib
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import httpx
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.global_config import DictConfig
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from worker_loop import Gym, serve

_ROUTES_THAT_ARE_NO_TOOLS = frozenset(
    {"/verify", "/seed_session", "/aggregate_metrics", "/reset", "/step"}
)


class NemoGym(Gym):
    """Rows of NeMo Gym's data sets: a session each, its tools, its verification."""

    def __init__(self, config: dict[str, Any]) -> None:
        module = importlib.import_module(f"resources_servers.{config['server']}.app")
        found = find_server_class(module)
        fields = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": config["server"]}
        server_config = found.model_fields["config"].annotation(**fields, **config["options"])
        client = ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=0),
            global_config_dict=DictConfig({}),
        )
        self._app = found(config=server_config, server_client=client).setup_webserver()
        paths = {getattr(route, "path", "") for route in self._app.routes}
        self._has_steps = "/step" in paths
        self._tools = {path.lstrip("/") for path in paths - _ROUTES_THAT_ARE_NO_TOOLS}
        self._client: httpx.AsyncClient | None = None
        self._row: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        await self.close()
        transport = httpx.ASGITransport(app=self._app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://gym", timeout=None)
        self._row, self._output = task, []
        route = "/reset" if self._has_steps else "/seed_session"
        told = await self._post(route, self._row)
        asked = task["responses_create_params"]
        given = asked["input"]
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        return {
            "text": told.get("observation") or "",
            "messages": [to_chat_message(one) for one in messages],
            "tools": [to_chat_tool(one) for one in asked.get("tools") or ()],
        }

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        output = build_response_output_items(reply)
        if self._has_steps:
            told = await self._post(
                "/step", {**self._row, "response": self._build_response(output)}
            )
            return {
                "text": told["observation"] or "",
                "reward": float(told["reward"]),
                "done": bool(told["terminated"] or told["truncated"]),
            }
        self._output += output
        results = [
            {"id": one["id"], "text": await self._call(one["name"], one["arguments"])}
            for one in reply["calls"]
        ]
        if results:
            self._output += [
                {"type": "function_call_output", "call_id": one["id"], "output": one["text"]}
                for one in results
            ]
            return {"results": results, "reward": 0.0, "done": False}
        row = {**self._row, "response": self._build_response(self._output)}
        return {
            "text": "",
            "reward": float((await self._post("/verify", row))["reward"]),
            "done": True,
        }

    async def _call(self, tool_name: str, arguments: str) -> str:
        if tool_name not in self._tools:
            return f"error: there is no tool {tool_name!r}"
        assert self._client is not None
        try:
            given = json.loads(arguments or "{}")
        except ValueError:
            return "error: the arguments are no JSON"
        told = await self._client.post(f"/{tool_name}", json=given)
        return told.text

    async def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert self._client is not None
        told = await self._client.post(route, json=body)
        if told.is_error:
            raise RuntimeError(f"{route} answered {told.status_code}: {told.text[:500]}")
        answer = told.json()
        return answer if isinstance(answer, dict) else {}

    def _build_response(self, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "created_at": time.time(),
            "model": "default",
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._row["responses_create_params"].get("tools") or [],
        }

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def find_server_class(module: Any) -> Any:
    found = [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, SimpleResourcesServer)
        and one.__module__ == module.__name__
    ]
    if not found:
        raise ValueError(f"{module.__name__} defines no resources server")
    return found[-1]


def build_response_output_items(reply: dict[str, Any]) -> list[dict[str, Any]]:
    text = {"type": "output_text", "text": reply["text"], "annotations": []}
    message = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [text],
    }
    calls = [
        {
            "type": "function_call",
            "id": one["id"],
            "call_id": one["id"],
            "name": one["name"],
            "arguments": one["arguments"],
            "status": "completed",
        }
        for one in reply["calls"]
    ]
    return [*([message] if reply["text"] or not calls else []), *calls]


def to_chat_message(responses_message: dict[str, Any]) -> dict[str, Any]:
    role = "system" if responses_message["role"] == "developer" else responses_message["role"]
    content = responses_message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    return {"role": role, "content": content}


def to_chat_tool(responses_tool: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {name: responses_tool[name] for name in names if responses_tool.get(name)},
    }


if __name__ == "__main__":
    serve(NemoGym)

"""Worker of `NemoGymAgent`: runs a resources server of NeMo Gym in this process."""

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
    """Gym that plays each row of a NeMo Gym data set in one session of the server."""

    def __init__(self, config: dict[str, Any]) -> None:
        module = importlib.import_module(f"resources_servers.{config['server']}.app")
        server = find_server_class(module)
        fields = {"host": "127.0.0.1", "port": 0, "entrypoint": "app.py", "name": config["server"]}
        server_config = server.model_fields["config"].annotation(**fields, **config["options"])
        client = ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=0),
            global_config_dict=DictConfig({}),
        )
        self._app = server(config=server_config, server_client=client).setup_webserver()
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
        answer = await self._post(route, self._row)
        request = task["responses_create_params"]
        content = request["input"]
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {
            "text": answer.get("observation") or "",
            "messages": [to_chat_message(message) for message in messages],
            "tools": [to_chat_tool(tool) for tool in request.get("tools") or ()],
        }

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        output = build_response_output_items(reply)
        if self._has_steps:
            answer = await self._post(
                "/step", {**self._row, "response": self._build_response(output)}
            )
            return {
                "text": answer["observation"] or "",
                "reward": float(answer["reward"]),
                "done": bool(answer["terminated"] or answer["truncated"]),
            }
        self._output += output
        results = [
            {"id": call["id"], "text": await self._call(call["name"], call["arguments"])}
            for call in reply["calls"]
        ]
        if results:
            self._output += [
                {"type": "function_call_output", "call_id": item["id"], "output": item["text"]}
                for item in results
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
            call_arguments = json.loads(arguments or "{}")
        except ValueError:
            return "error: the arguments are no JSON"
        response = await self._client.post(f"/{tool_name}", json=call_arguments)
        return response.text

    async def _post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert self._client is not None
        response = await self._client.post(route, json=body)
        if response.is_error:
            raise RuntimeError(f"{route} answered {response.status_code}: {response.text[:500]}")
        answer = response.json()
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
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, SimpleResourcesServer)
        and value.__module__ == module.__name__
    ]
    if not classes:
        raise ValueError(f"{module.__name__} defines no resources server")
    return classes[-1]


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
            "id": call["id"],
            "call_id": call["id"],
            "name": call["name"],
            "arguments": call["arguments"],
            "status": "completed",
        }
        for call in reply["calls"]
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

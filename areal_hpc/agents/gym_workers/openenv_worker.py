"""Worker of `OpenEnvAgent`: a client of OpenEnv, and its server if the recipe names an app."""

import asyncio
import contextlib
import importlib
import json
import socket
import threading
import time
from typing import Any

import httpx
import uvicorn
from openenv.core.generic_client import GenericEnvClient
from worker_loop import Gym, find_action_tags, serve

SERVER_START_TIMEOUT_S = 60.0
_FIELDS_NOT_FROM_MODEL = frozenset({"metadata"})
"""Fields of every action that the model does not write."""
_HIDDEN_OBSERVATION_FIELDS = frozenset({"done", "reward", "metadata"})


class OpenEnvGym(Gym):
    """Gym that plays each episode in one session of a server, which it starts for an app."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        if config["app"]:
            importlib.import_module(config["app"].partition(":")[0])
        self._open = contextlib.AsyncExitStack()
        self._client: Any = None

    def _start(self) -> None:
        """Start the server in the episode's fork, where a thread of the parent would not run."""
        self._url = self._config["base_url"] or start_server(self._config["app"])
        schema = httpx.get(f"{self._url}/schema", timeout=60).raise_for_status().json()["action"]
        fields = {
            name: field
            for name, field in schema["properties"].items()
            if name not in _FIELDS_NOT_FROM_MODEL
        }
        texts = [name for name, field in fields.items() if field.get("type") == "string"]
        self._text_field = texts[0] if len(fields) == len(texts) == 1 else None
        self._hint = f"Reply with <action>JSON</action>, an object of {json.dumps(fields)}."

    async def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        await asyncio.to_thread(self._start)
        self._client = await self._open.enter_async_context(GenericEnvClient(self._url))
        result = await self._client.reset(**task.get("reset", {}))
        instructions = "" if self._text_field else f"\n{self._hint}"
        return {"text": f"{describe_observation(result.observation)}{instructions}"}

    async def step(self, reply: dict[str, Any]) -> dict[str, Any]:
        try:
            result = await self._client.step(self._parse_action(reply["text"]))
        except (ValueError, RuntimeError) as error:  # RuntimeError: the server refused it
            return {"text": f"{error}. {self._hint}", "reward": 0.0, "done": False}
        return {
            "text": describe_observation(result.observation),
            "reward": float(result.reward or 0.0),
            "done": bool(result.done),
        }

    def _parse_action(self, text: str) -> dict[str, Any]:
        tags = find_action_tags(text)
        content = tags[-1].strip() if tags else text.strip()
        if self._text_field is not None:
            return {self._text_field: content}
        action = json.loads(content)
        if not isinstance(action, dict):
            raise ValueError("That is no JSON object")
        return action

    async def close(self) -> None:
        await self._open.aclose()


def describe_observation(observation: dict[str, Any]) -> str:
    visible_fields = {
        name: value for name, value in observation.items() if name not in _HIDDEN_OBSERVATION_FIELDS
    }
    texts = list(visible_fields.values())
    return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else json.dumps(visible_fields)


def start_server(app: str) -> str:
    """Serve `package.module:app` on a loopback port in a thread, and return its URL."""
    module, _, name = app.partition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        getattr(importlib.import_module(module), name), log_level="warning", lifespan="on"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    give_up_at = time.monotonic() + SERVER_START_TIMEOUT_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > give_up_at:
            raise RuntimeError(f"{app} does not serve")
        time.sleep(0.05)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


if __name__ == "__main__":
    serve(OpenEnvGym)

"""The scripted SGLang as a server process, with SGLang's own words on its command line.

A real inference job starts it in the place of SGLang, and its control proxy stands in front of it.
"""

import argparse
import asyncio
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from areal_hpc.inference.server.sglang_main import consume_keys_file
from tests.support.scripted_sglang import ScriptedSGLang

LOADS = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}


class ScriptedServer(ScriptedSGLang):
    def build_app(self) -> web.Application:
        app = super().build_app()
        for path in ("/ready", "/health_generate"):
            app.router.add_get(path, self._say_yes)
        app.router.add_get("/v1/loads", self._show_loads)
        app.router.add_post("/{route}", self._take_order)
        return app

    async def _say_yes(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _show_loads(self, request: web.Request) -> web.Response:
        now = asyncio.get_running_loop().time()
        return web.json_response({"loads": [{"timestamp": now, **LOADS}]})

    async def _take_order(self, request: web.Request) -> web.Response:
        try:
            order: Any = await request.json()
        except ValueError:
            return web.json_response({"error": {"message": "no JSON"}}, status=400)
        if request.match_info["route"] == "end_weight_update" and isinstance(order, dict):
            self.version = str(order.get("weight_version") or self.version)
        return web.json_response({"success": True})


async def serve(port: int, model_path: str) -> None:
    server = ScriptedServer(Tokenizer.from_file(f"{model_path}/tokenizer.json"))
    await server.start(port)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--model-path")
    arguments, _ = parser.parse_known_args()
    consume_keys_file()
    asyncio.run(serve(arguments.port, arguments.model_path))


if __name__ == "__main__":
    main()

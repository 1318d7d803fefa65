"""Engine connection, tokenizer and parsers of `ArealOpenAI` clients, shared within a process."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from areal_hpc.errors import RecipeError
from areal_hpc.jobs.config import get_interpreter
from areal_hpc.proxy.engine.generation import UnfinishedEngineCallError
from areal_hpc.proxy.engine.router import Router, StaticReplicaSource
from areal_hpc.proxy.engine.sglang_client import SGLangClient
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.recipe.hub_cache import REPO_PATTERN, find_snapshot
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder
from areal_hpc.wire.proxy import EngineAddress
from areal_hpc.wire.replicas import ReplicaView, ServerKeys


class EngineEndpoint:
    """Server with SGLang's `/generate`: SGLang itself, or a proxy's session.

    Clients that share an instance share its connection pool.
    """

    def __init__(self, url: str, *, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._upstream: SGLangClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_address(
        cls, engine_or_address: EngineEndpoint | EngineAddress | str
    ) -> EngineEndpoint:
        if isinstance(engine_or_address, EngineEndpoint):
            return engine_or_address
        if isinstance(engine_or_address, str):
            return cls(engine_or_address)
        return cls(engine_or_address.url, api_key=engine_or_address.api_key)

    def get_client(self) -> SGLangClient:
        loop = asyncio.get_running_loop()
        if self._upstream is None or self._loop is not loop:
            self._upstream, self._loop = SGLangClient(), loop
        return self._upstream

    async def close(self) -> None:
        if self._upstream is not None and self._loop is asyncio.get_running_loop():
            await self._upstream.close()
            self._upstream = None


class SingleServerRouter(Router):
    """Router to one server, which it never gives up: there is no other."""

    def __init__(self, engine: EngineEndpoint) -> None:
        super().__init__(StaticReplicaSource([engine.url]))
        keys = ServerKeys(engine.api_key, engine.api_key)
        self._serving = {0: ReplicaView(0, 1, "serving", engine.url, keys=keys)}

    def on_call_lost(self, replica: ReplicaView, error: UnfinishedEngineCallError) -> None:
        pass


_PARSERS_BY_LOOP: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str | None, str | None, str], ParserProcessClient]
] = WeakKeyDictionary()


def get_shared_parsers(
    tool_call_parser: str | None, reasoning_parser: str | None, serve_python: str
) -> ParserProcessClient | None:
    """Return the parsers that clients of the running event loop share; None if none is named.

    The first reply to parse starts their process and takes some seconds longer; the process ends
    with this one.
    """
    if not tool_call_parser and not reasoning_parser:
        return None
    parsers = _PARSERS_BY_LOOP.setdefault(asyncio.get_running_loop(), {})
    key = (tool_call_parser, reasoning_parser, serve_python)
    if key not in parsers:
        python = get_interpreter("serve", serve_python)
        parsers[key] = ParserProcessClient(python, tool_call_parser, reasoning_parser)
    return parsers[key]


_SESSION_TOKENIZER_CACHE: WeakKeyDictionary[Any, tuple[ChatTemplate, TokenEncoder]] = (
    WeakKeyDictionary()
)
"""Cache: copying a large vocabulary takes a quarter of a second, and each episode has a client."""


def load_tokenizer(tokenizer: Any) -> tuple[ChatTemplate, TokenEncoder]:
    """Return the chat template and the encoder of a tokenizer.

    Args:
        tokenizer: Fast tokenizer of `transformers`, the directory of a model, or `owner/name` of a
            model in the hub's cache.
    """
    if isinstance(tokenizer, str | Path):
        folder = Path(tokenizer)
        if not folder.exists() and re.fullmatch(REPO_PATTERN, str(tokenizer)):
            folder = find_snapshot(str(tokenizer), "model", "tokenizer")
        return ChatTemplate.from_model_dir(folder), TokenEncoder.from_model_dir(folder)
    converted = _SESSION_TOKENIZER_CACHE.get(tokenizer)
    if converted is None:
        converted = _SESSION_TOKENIZER_CACHE[tokenizer] = _convert_tokenizer(tokenizer)
    return converted


def _convert_tokenizer(tokenizer: Any) -> tuple[ChatTemplate, TokenEncoder]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RecipeError(
            f"expected a fast tokenizer or a model directory, got a {type(tokenizer).__name__}",
            hint="load it with transformers.AutoTokenizer.from_pretrained",
        )
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        raise RecipeError("the tokenizer has no chat template", hint="set its chat_template")
    special = {
        name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
    }
    # A copy: encoders switch off truncation and padding, which its owner may need.
    copy = Tokenizer.from_str(backend.to_str())
    return ChatTemplate(source, special), TokenEncoder(copy, len(tokenizer))

"""Cancellation of work whose client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from areal_hpc.errors import ClientDisconnectedError

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's: the next message from the client. After the request's body only its disconnect comes."""
Result = TypeVar("Result")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; cancels it when the client disconnects first.

    Args:
        receive: Of a request whose body has been read.
        work: What the client waits for.

    Raises:
        ClientDisconnectedError: It disconnected.
    """
    worker = asyncio.current_task()
    assert worker is not None
    has_disconnected = False

    async def watch() -> None:
        nonlocal has_disconnected
        while (await receive())["type"] != "http.disconnect":
            pass
        has_disconnected = True
        worker.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not has_disconnected:
            raise
        worker.uncancel()
        raise ClientDisconnectedError from None
    finally:
        watcher.cancel()

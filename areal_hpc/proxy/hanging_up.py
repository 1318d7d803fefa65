"""Clients that hang up before they have been answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's."""
Awaited = TypeVar("Awaited")


class ClientGone(Exception):
    """Nobody is left to answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Awaited]) -> Awaited:
    """The work's result; cancels it when the client hangs up first.

    Args:
        receive: The request's own; its body has been read.
        work: What the client waits for.

    Raises:
        ClientGone: It hung up.
    """
    here = asyncio.current_task()
    assert here is not None
    is_over = False

    def stop(gone: asyncio.Future[Any]) -> None:
        if not is_over:  # sending the end of an answer wakes who listens, too
            here.cancel()

    listening = receive().__await__()
    try:
        # Runs up to the future that it waits for; a task to wait in would cost more than a call.
        gone = next(listening)
    except StopIteration:
        work.close()
        raise ClientGone from None
    gone.add_done_callback(stop)
    try:
        return await work
    except asyncio.CancelledError:
        if not gone.done():
            raise
        here.uncancel()
        raise ClientGone from None
    finally:
        is_over = True
        gone.remove_done_callback(stop)
        listening.close()

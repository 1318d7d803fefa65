"""Clients that hang up before they have been answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

GONE = "areal_hpc.gone"
"""The extension of ASGI's scope whose `future` is done when the client hangs up."""
Awaited = TypeVar("Awaited")


class ClientGone(Exception):
    """Nobody is left to answer."""


async def unless_gone(
    gone: asyncio.Future[None] | None, work: Coroutine[Any, Any, Awaited]
) -> Awaited:
    """The work's result; cancels it when the client hangs up first.

    Args:
        gone: Done when it has hung up; None if it cancels its request itself, in this process.
        work: What the client waits for.

    Raises:
        ClientGone: It hung up.
    """
    if gone is None:
        return await work
    if gone.done():
        work.close()
        raise ClientGone
    here = asyncio.current_task()
    assert here is not None
    is_over = False

    def stop(gone: asyncio.Future[None]) -> None:
        if not is_over:  # it may be called late, although it was removed
            here.cancel()

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

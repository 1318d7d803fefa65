"""Long polling of ledger requests."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Receive


class Notifier:
    """Wakes everyone who waits for `news`."""

    def __init__(self) -> None:
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Resolved by the next `notify_all`."""

    def notify_all(self) -> None:
        self.news.set_result(None)
        self.news = asyncio.get_running_loop().create_future()


class LongPoll:
    """Wait of one ASGI request whose body has been read; ends early when its caller is gone.

    Args:
        clock: That of the service.
        receive: The request's: after the body it yields only `http.disconnect`. None: a caller in
            this process, which does not hang up.
        closing: Resolved when the server stops: then nobody waits any more.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        receive: Receive | None = None,
        closing: asyncio.Future[None] | None = None,
    ) -> None:
        self._clock, self._receive = clock, receive
        self._closing = closing or asyncio.get_running_loop().create_future()
        self._hang_up: asyncio.Future[Any] | None = None

    async def wait_for(self, notifier: Notifier, until_s: float) -> bool:
        """True after a notification; False once `until_s` has come or the server stops.

        Raises:
            ClientDisconnect: The caller hung up. A ticket granted to it now would be lost.
        """
        left_s = until_s - self._clock()
        if left_s <= 0 or self._closing.done():
            return False
        if self._hang_up is None and self._receive is not None:
            self._hang_up = asyncio.ensure_future(self._receive())
        news = notifier.news
        ends = [one for one in (news, self._hang_up, self._closing) if one is not None]
        await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self._hang_up is not None and self._hang_up.done():
            raise ClientDisconnect
        return news.done()

    def stop_disconnect_watch(self) -> None:
        """Stop listening for the caller."""
        if self._hang_up is not None:
            self._hang_up.cancel()

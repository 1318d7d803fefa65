"""What a session remembers of its requests is bounded, whatever becomes of them."""

import asyncio

import pytest

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.http.repeated_requests import (
    MAX_KEPT_ANSWER_BYTES_PER_SESSION,
    MAX_KEPT_REQUESTS_PER_SESSION,
    Answer,
    SessionRequests,
)

HALF = MAX_KEPT_ANSWER_BYTES_PER_SESSION // 2 + 1


class Client:
    """Sends requests under keys to one that answers with so many bytes, or refuses."""

    def __init__(self) -> None:
        self.requests = SessionRequests()
        self.samples = 0

    async def ask(self, key: str, size_bytes: int = 1) -> None:
        async def answer(is_retry: bool, keeps_content: bool) -> Answer:
            if not size_bytes:
                raise ProxyRequestError(503, "busy")
            self.samples += 1
            return Answer(b"x" * size_bytes, "text/plain", [])

        headers = {b"idempotency-key": key.encode()}
        await self.requests.answer_once(headers, key.encode, answer)


@pytest.mark.parametrize("size_bytes", [0, 1, HALF])
def test_the_oldest_keys_are_forgotten(size_bytes: int) -> None:
    client = Client()

    async def play() -> None:
        await client.ask("first", max(1, size_bytes))
        await client.ask("first")
        assert client.samples == 1
        for number in range(1 if size_bytes == HALF else MAX_KEPT_REQUESTS_PER_SESSION):
            if size_bytes:
                await client.ask(str(number), size_bytes)
            else:
                with pytest.raises(ProxyRequestError):
                    await client.ask(str(number), 0)
        before = client.samples
        await client.ask("first")
        assert client.samples == before + 1

    asyncio.run(play())

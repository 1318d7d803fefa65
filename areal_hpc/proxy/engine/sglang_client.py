"""Client of SGLang's `/generate`, which sends and receives token ids."""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.engine.generation import (
    ChunkReader,
    EngineHungUpError,
    EngineResponseError,
    Generation,
    SamplingParams,
    TokenChunk,
    UnfinishedEngineCallError,
    decode_generation,
    extract_error_text,
)
from areal_hpc.proxy.engine.http_client import Connection, ConnectionPool, UnreachableError
from areal_hpc.wire.fault_points import fault_point
from areal_hpc.wire.replicas import ReplicaView

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 5.0
IDLE_POOL_LIFETIME_S = 60.0
"""Idle time after which the connections to a server are closed when those to a new one are made."""
Answered = TypeVar("Answered")


class GenerateRequest(msgspec.Struct, frozen=True):
    """Request to generate. `prompt_ids_json_inside` is the inside of a JSON array of token ids."""

    rid: str
    prompt_ids_json_inside: bytes
    sampling: SamplingParams
    top_logprobs: int = 0
    reasons_first: bool = False
    """Whether the reply begins inside its reasoning; a grammar starts after that."""
    records_sampling_mask: bool = False
    """Whether to return the tokens that could be sampled; it requires a finite top_k."""
    routes_from: int = -1
    """First token for which to return the visited experts; -1: for none."""

    def encode_body(self, *, stream: bool) -> bytes:
        """Encode the body of `/generate`; joined, because the ids are long and already JSON."""
        return b"".join(
            (
                b'{"input_ids":[',
                self.prompt_ids_json_inside,
                b'],"sampling_params":',
                msgspec.json.encode(self.sampling),
                b',"return_logprob":true,"rid":"',
                self.rid.encode(),
                b'"',
                b',"top_logprobs_num":%d' % self.top_logprobs if self.top_logprobs else b"",
                b',"require_reasoning":true' if self.reasons_first else b"",
                b',"return_sampling_mask":true' if self.records_sampling_mask else b"",
                b',"return_routed_experts":true,"routed_experts_start_len":%d' % self.routes_from
                if self.routes_from >= 0
                else b"",
                b',"stream":true' if stream else b"",
                b"}",
            )
        )


class SGLangClient:
    """Client of SGLang servers, with a pool of connections to each. Make it in the event loop."""

    def __init__(self) -> None:
        self._pools: dict[tuple[str, str], ConnectionPool] = {}
        """Pools by address and key: SGLang requires one key to generate and another to abort."""
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(
        self, replica: ReplicaView, request: GenerateRequest, timeout_s: float
    ) -> Generation:
        """Generate and wait for the reply, which is partial if the server aborts it."""
        return decode_generation(replica.url, await self.generate_raw(replica, request, timeout_s))

    async def generate_streaming(
        self,
        replica: ReplicaView,
        request: GenerateRequest,
        timeout_s: float,
        take_chunk: Callable[[TokenChunk], Awaitable[None]],
    ) -> Generation:
        """Generate, and pass each chunk to `take_chunk` as it comes.

        After an `abort` this returns the tokens generated before.
        """
        reader = ChunkReader(replica.url, request.sampling.stop or ())

        async def read() -> Generation:
            pool = self._get_pool(replica.url, replica.keys.api)
            answering = pool.stream_answer("/generate", request.encode_body(stream=True))
            async with asyncio.timeout(timeout_s), answering as answer:
                if answer.status != 200:
                    _raise_for_status(replica.url, answer.status, await answer.read_body())
                async for data in _read_events(answer):
                    chunk, whole = reader.read_event(data)
                    if chunk.output_ids or chunk.text:
                        await take_chunk(chunk)
                    if whole is not None:
                        return whole
            raise EngineHungUpError(f"{replica.url} ended the stream early")

        try:
            return await self._await_answer(replica, request.rid, timeout_s, read())
        except UnfinishedEngineCallError as lost:
            lost.partial = reader.build_partial_generation()
            raise

    async def generate_raw(
        self, replica: ReplicaView, request: GenerateRequest, timeout_s: float
    ) -> bytes:
        """Generate, and return the body of the server's answer."""
        body = request.encode_body(stream=False)
        call = self._get_pool(replica.url, replica.keys.api).post("/generate", body, timeout_s)
        status, answer = await self._await_answer(replica, request.rid, timeout_s, call)
        _raise_for_status(replica.url, status, answer)
        return answer

    async def _await_answer(
        self, replica: ReplicaView, rid: str, timeout_s: float, call: Coroutine[Any, Any, Answered]
    ) -> Answered:
        fault_point("proxy.generate")
        try:
            return await call
        except TimeoutError:
            self.abort(replica, rid)
            raise ProxyRequestError(
                504, f"no reply from the model within {timeout_s:.0f} s"
            ) from None
        except asyncio.CancelledError:
            self.abort(replica, rid)
            raise
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # a limit of this process
                raise ProxyRequestError(503, "too many open files") from error
            kind = (
                UnfinishedEngineCallError
                if isinstance(error, UnreachableError)
                else EngineHungUpError
            )
            raise kind(f"{replica.url}: {type(error).__name__}: {error}") from error

    def _get_pool(self, url: str, key: str) -> ConnectionPool:
        pool = self._pools.get((url, key))
        if pool is None:
            header = f"authorization: Bearer {key}\r\n" if key else ""
            headers = f"content-type: application/json\r\n{header}"
            pool = ConnectionPool(url, headers, CONNECT_TIMEOUT_S)
            # A restarted replica has another address: the old one is not called again.
            for old_key, other in [*self._pools.items()]:
                if pool.used_at - other.used_at > IDLE_POOL_LIFETIME_S:
                    other.close()
                    del self._pools[old_key]
            self._pools[url, key] = pool
        return pool

    def abort(self, replica: ReplicaView, rid: str) -> None:
        task = asyncio.ensure_future(self._send_abort(replica, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, replica: ReplicaView, rid: str) -> None:
        try:
            body = msgspec.json.encode({"rid": rid})
            await self._get_pool(replica.url, replica.keys.admin).post(
                "/abort_request", body, ABORT_TIMEOUT_S
            )
        except OSError as error:
            log.info("abort of %s did not reach %s: %s", rid, replica.url, error)

    async def close(self) -> None:
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)
        for pool in self._pools.values():
            pool.close()


def _raise_for_status(base_url: str, status_code: int, answer: bytes) -> None:
    if status_code == 503:  # the server starts, is paused or is full: not due to the call
        raise UnfinishedEngineCallError(f"{base_url} answered {status_code}: {answer[:300]!r}")
    if status_code >= 500:
        raise EngineResponseError(
            f"{base_url} answered {status_code}: {extract_error_text(answer)}"
        )
    if status_code >= 400:
        raise ProxyRequestError(400, f"SGLang rejected the request: {extract_error_text(answer)}")


async def _read_events(answer: Connection) -> AsyncIterator[bytes]:
    blocks: list[bytes] = []  # blocks of an unfinished line, which may have megabytes
    while block := await answer.read_part():
        blocks.append(block)
        if b"\n" not in block:
            continue
        *lines, rest = b"".join(blocks).split(b"\n")
        blocks = [rest]
        for line in lines:
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield line[6:]

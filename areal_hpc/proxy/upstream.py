"""One model call to an SGLang server: token ids in, token ids out.

Wire facts of SGLang 0.5.23 (`/generate`, `srt/managers/io_struct.py`): log-probabilities are those
of the sampling distribution (scaled by the temperature, not renormalised for top-k/top-p); a stop
token is part of the output ids; `weight_versions` are spans over the output tokens.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp
import msgspec
from msgspec import Struct, field

from areal_hpc.proxy.refusal import RequestRefused
from areal_hpc.session.tree import VersionSpan
from areal_hpc.weights.version import WeightVersion

log = logging.getLogger(__name__)

UNVERSIONED = "default"
"""What SGLang calls weights that nobody gave a version."""
CONNECT_TIMEOUT_S = 5.0
ABORT_TIMEOUT_S = 5.0


class UpstreamLost(Exception):
    """The server died, refused, or broke the call off: another one may answer it."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """SGLang's `sampling_params`; what is left out has SGLang's default."""

    temperature: float
    max_new_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    sampling_seed: int | None = None


class _Span(Struct):
    version: str
    start: int
    end: int


class _FinishReason(Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None


class _Meta(Struct):
    finish_reason: _FinishReason
    weight_versions: list[_Span]
    output_token_logprobs: list[tuple[float, int, str | None]] = field(default_factory=list)
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None
    cached_tokens: int = 0


class _Reply(Struct):
    text: str
    output_ids: list[int]
    meta_info: _Meta


_reply_decoder = msgspec.json.Decoder(_Reply)


class Generation(Struct, frozen=True):
    """What the model said."""

    text: str
    """Without special tokens and without the stop string that ended it."""
    output_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    """`stop` or `length`."""
    closed: bool
    """The last token is a stop token."""
    cached_tokens: int
    top_logprobs: list[list[tuple[float, int, str | None]] | None]
    """Per output token, most likely first; empty unless asked for."""


class Upstream:
    """Calls SGLang servers over one shared connection pool. Make it inside the event loop."""

    def __init__(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
        )
        self._aborts: set[asyncio.Task[None]] = set()

    async def generate(
        self,
        base_url: str,
        prompt_json: bytes,
        sampling: SamplingParams,
        *,
        rid: str,
        timeout_s: float,
        top_logprobs: int = 0,
    ) -> Generation:
        """Generate from a prompt given as the inside of a JSON array of ids.

        Args:
            base_url: The server's.
            prompt_json: Comma-separated token ids.
            sampling: What to pass as `sampling_params`.
            rid: Unique among the live requests of the server.
            timeout_s: Longest time the call may take.
            top_logprobs: Alternatives to report per token.

        Raises:
            UpstreamLost: The server did not finish the call.
            RequestRefused: It says the request is wrong, or took too long.
        """
        extra = b',"top_logprobs_num":%d' % top_logprobs if top_logprobs else b""
        body = b"".join(
            (
                b'{"input_ids":[',
                prompt_json,
                b'],"sampling_params":',
                msgspec.json.encode(sampling),
                b',"return_logprob":true,"rid":"',
                rid.encode(),
                b'"',
                extra,
                b"}",
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                status, answer = await self._post(f"{base_url}/generate", body)
        except aiohttp.ServerTimeoutError as error:  # it does not even accept connections
            raise UpstreamLost(f"{base_url} does not accept: {error}") from error
        except TimeoutError:
            self._abort(base_url, rid)
            raise RequestRefused(
                504, f"the model did not answer within {timeout_s:.0f} s"
            ) from None
        except asyncio.CancelledError:
            self._abort(base_url, rid)
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamLost(f"{base_url}: {type(error).__name__}: {error}") from error
        if status >= 500:
            raise UpstreamLost(f"{base_url} answered {status}: {answer[:300]!r}")
        if status >= 400:
            raise RequestRefused(400, f"the model server refused: {_error_text(answer)}")
        return _generation(base_url, answer)

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        async with self._http.post(url, data=body, headers=headers) as answer:
            return answer.status, await answer.read()

    def _abort(self, base_url: str, rid: str) -> None:
        """Tell the server that nobody waits any more. SGLang notices by itself only after 4 s."""
        task = asyncio.ensure_future(self._send_abort(base_url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, base_url: str, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._post(f"{base_url}/abort_request", msgspec.json.encode({"rid": rid}))
        except (aiohttp.ClientError, OSError) as error:
            log.info("abort of %s did not reach %s: %s", rid, base_url, error)

    async def close(self) -> None:
        """Send what aborts are still under way and close pooled connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=1.0)
        await self._http.close()


def _error_text(answer: bytes) -> str:
    """The sentence inside one of SGLang's two error shapes."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer[:300].decode(errors="replace")


def _generation(base_url: str, answer: bytes) -> Generation:
    try:
        reply = _reply_decoder.decode(answer)
    except msgspec.DecodeError as error:
        raise UpstreamLost(f"{base_url} answered something else: {error}") from error
    meta = reply.meta_info
    reason = meta.finish_reason
    if reason.type == "abort":
        raise UpstreamLost(f"{base_url} broke the call off: {reason.message}")
    logprobs = [entry[0] for entry in meta.output_token_logprobs]
    if [entry[1] for entry in meta.output_token_logprobs] != reply.output_ids:
        raise UpstreamLost(f"{base_url}: ids and log-probabilities of the reply disagree")
    spans = [
        VersionSpan(_packed(base_url, s.version), s.start, s.end) for s in meta.weight_versions
    ]
    covered = 0
    for span in spans:
        if span.start != covered:
            break
        covered = span.end
    if covered != len(reply.output_ids):
        raise UpstreamLost(f"{base_url}: weight versions cover {covered} of the reply's tokens")
    return Generation(
        text=reply.text,
        output_ids=reply.output_ids,
        logprobs=logprobs,
        spans=spans,
        finish_reason=reason.type,
        closed=reason.type == "stop" and isinstance(reason.matched, int),
        cached_tokens=meta.cached_tokens,
        top_logprobs=meta.output_top_logprobs or [],
    )


def _packed(base_url: str, version: str) -> int:
    if version == UNVERSIONED:
        return WeightVersion(0, 0).packed
    try:
        return WeightVersion.parse(version).packed
    except ValueError as error:
        raise UpstreamLost(f"{base_url}: {error}") from error

"""Requests and replies of SGLang's `/generate`, whole or streamed.

Wire facts of SGLang 0.5.23 (`srt/managers/io_struct.py`, `tokenizer_manager.py`):
log-probabilities are those of the sampling distribution (scaled by the temperature, not
renormalized for top-k/top-p); a stop token is part of the output ids; `weight_versions` are
spans over the output tokens and come with the end. Each event of a stream repeats everything so
far, unless the server runs with `--incremental-streaming-output`: then each has only the new part.
`completion_tokens` counts from the beginning in both modes, which shows the mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from areal_hpc.errors import ProxyRequestError
from areal_hpc.session.tree import (
    ABORT_FINISH_REASON,
    VersionSpan,
    pack_counts_as_uint16,
    pack_ids,
    pack_logprobs,
)
from areal_hpc.wire.proxy import MAX_MASK_TOKENS_PER_POSITION
from areal_hpc.wire.weight_version import WeightVersion

SGLANG_DEFAULT_WEIGHT_VERSION = "default"
"""SGLang's version of weights without a version."""
TopLogprobs = list[tuple[float, int, str | None]] | None
"""(log-probability, token id, None) of the likeliest tokens at one position."""


NO_PENALTIES = (0.0, 0.0, 1.0)
Value = TypeVar("Value")


class UnfinishedEngineCallError(Exception):
    """Call that a server did not finish: it died, refused or aborted it. Another may answer it."""

    partial: Generation | None = None
    """Part of the reply that was streamed before; None if it is unsound or unknown."""


class EngineResponseError(UnfinishedEngineCallError):
    """Call that a server received and answered with an error or unsoundly; it may be healthy."""


class EngineHungUpError(UnfinishedEngineCallError):
    """Call that a server received, at least in part, before it hung up."""


class SamplingParams(Struct, frozen=True, omit_defaults=True):
    """SGLang's `sampling_params`; a missing one has SGLang's default."""

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
    logit_bias: dict[str, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    skip_special_tokens: bool = True
    min_new_tokens: int = 0
    ignore_eos: bool = False

    @property
    def active_grammar_names(self) -> list[str]:
        names = ("json_schema", "regex", "ebnf", "structural_tag")
        return [name for name in names if getattr(self, name) is not None]

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.frequency_penalty, self.presence_penalty, self.repetition_penalty

    @property
    def has_recordable_sampling_mask(self) -> bool:
        """Whether parameters exclude tokens, and the others keep the odds of the softmax."""
        is_random = self.temperature > 0 and self.top_k != 1
        is_softmax = self.penalties == NO_PENALTIES and not self.logit_bias
        is_partial = self.top_p < 1 or self.top_k > 0 or self.min_p > 0
        return is_random and is_softmax and (is_partial or bool(self.active_grammar_names))


class _ReplyVersionSpan(Struct):
    version: str
    start: int
    end: int


class _FinishReason(Struct):
    type: str
    matched: int | str | None = None
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(Struct):
    finish_reason: _FinishReason | None
    completion_tokens: int = 0
    weight_versions: list[_ReplyVersionSpan] = field(default_factory=list)
    output_token_logprobs: list[tuple[float, int, str | None]] = field(default_factory=list)
    output_top_logprobs: list[TopLogprobs] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float] | None = None
    routed_experts: bytes | None = None
    cached_tokens: int = 0
    weight_version: str = ""
    """Version of the server's weights at the time of the answer."""


class _Reply(Struct):
    text: str
    output_ids: list[int]
    meta_info: _MetaInfo


class _StreamError(Struct):
    error: dict[str, object]


_reply_decoder = msgspec.json.Decoder(_Reply)
_error_decoder = msgspec.json.Decoder(_StreamError)


class Generation(Struct, frozen=True):
    """Reply of a server, checked and with packed weight versions."""

    text: str
    """Text without the stop string that ended it, and without special tokens unless requested."""
    output_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    finish_reason: str
    """`stop`, `length`, or `abort` if its client left."""
    ends_with_stop_token: bool
    stop_text: str | None
    """Stop string that ended it."""
    cached_tokens: int
    top_logprobs: list[TopLogprobs]
    """Likeliest tokens per output token, most likely first; empty unless requested."""
    sampling_mask_ids: list[list[int]] = []
    """Ids that could be sampled, per output token; empty unless requested."""
    sampling_mask_logprobs: list[float] = []
    """Log-probabilities of the output tokens in the distribution over these ids."""
    routes: bytes = b""
    """Experts that tokens visited, as the server returned them; empty unless requested."""

    def pack_behavior_logprobs(self) -> bytes:
        return pack_logprobs(self.sampling_mask_logprobs or self.logprobs)

    def pack_sampling_mask(self) -> tuple[bytes, bytes]:
        if not self.sampling_mask_ids:
            return b"", b""
        flat = list(itertools.chain.from_iterable(self.sampling_mask_ids))
        return pack_counts_as_uint16(list(map(len, self.sampling_mask_ids))), pack_ids(flat)


class TokenChunk(Struct, frozen=True):
    text: str
    output_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    ends_with_stop_token: bool = False


def decode_generation(server_url: str, answer: bytes) -> Generation:
    reply = _decode_reply(server_url, answer)
    return _build_generation(server_url, reply.text, reply.output_ids, reply.meta_info)


class ChunkReader:
    def __init__(self, server_url: str, stop: Sequence[str]) -> None:
        self._server_url = server_url
        self._stop = stop
        self._text = ""
        self._sent_chars = 0
        self._output_ids: list[int] = []
        self._logprobs: list[tuple[float, int, str | None]] = []
        self._top_logprobs: list[TopLogprobs] = []
        self._kept_ids: list[list[int]] = []
        self._kept_logprobs: list[float] = []
        self._versions: set[str] = set()
        self._cached_tokens = 0
        self._is_sound = True

    def build_partial_generation(self) -> Generation | None:
        """Build a generation from the events of a broken stream; None if they are inconsistent.

        The spans of versions come only with the end of a stream. So all tokens count as sampled
        from the version that the events name, and no other number of versions than one is accepted.
        """
        ids = [entry[1] for entry in self._logprobs]
        spans: list[VersionSpan] = []
        if self._output_ids:
            if not self._is_sound or ids != self._output_ids or len(self._versions) != 1:
                return None
            try:
                version = _pack_version(self._server_url, *self._versions)
            except UnfinishedEngineCallError:
                return None
            spans.append(VersionSpan(version, 0, len(ids)))
        return Generation(
            text=self._text,
            output_ids=self._output_ids,
            logprobs=[entry[0] for entry in self._logprobs],
            spans=spans,
            finish_reason=ABORT_FINISH_REASON,
            ends_with_stop_token=False,
            stop_text=None,
            cached_tokens=self._cached_tokens,
            top_logprobs=self._top_logprobs,
            **_keep_mask_fields(ids, self._kept_ids, self._kept_logprobs),
        )

    def read_event(self, data: bytes) -> tuple[TokenChunk, Generation | None]:
        """Read the data of one event; return the new part, and at the end the whole generation.

        Text that may be the beginning of a stop string is held back.
        """
        if data.startswith(b'{"error"'):
            raise _build_error_event_exception(self._server_url, data)
        self._is_sound = False  # in case this raises
        reply = _decode_reply(self._server_url, data)
        meta = reply.meta_info
        self._versions.add(meta.weight_version)
        self._cached_tokens = meta.cached_tokens
        count = meta.completion_tokens - len(self._output_ids)

        def take_new(values: list[Value] | None) -> list[Value]:
            return values[-count:] if values and count > 0 else []

        new_ids, new_tops = take_new(reply.output_ids), take_new(meta.output_top_logprobs)
        new_logprobs = take_new(meta.output_token_logprobs)
        self._kept_ids += take_new(meta.output_token_sampling_mask)
        self._kept_logprobs += take_new(meta.output_token_sampling_logprobs)
        repeats = len(reply.output_ids) == meta.completion_tokens
        self._text = reply.text if repeats else self._text + reply.text
        self._output_ids += new_ids
        self._logprobs += new_logprobs
        self._top_logprobs += new_tops
        whole = None
        if meta.finish_reason is not None:
            matched = meta.finish_reason.matched
            if isinstance(matched, str) and not repeats:
                # The server cut the stop string off, but had already sent its beginning.
                self._text = self._text[
                    : len(self._text) - count_stop_prefix_chars(self._text, [matched])
                ]
            meta.output_token_logprobs = self._logprobs
            meta.output_top_logprobs = self._top_logprobs
            meta.output_token_sampling_mask = self._kept_ids
            meta.output_token_sampling_logprobs = self._kept_logprobs
            whole = _build_generation(self._server_url, self._text, self._output_ids, meta)
        end = len(self._text)
        if whole is None:
            end -= count_stop_prefix_chars(self._text, self._stop)
        new_text = self._text[self._sent_chars : end]
        self._sent_chars = max(end, self._sent_chars)
        self._is_sound = True
        has_stopped = whole is not None and whole.ends_with_stop_token
        new_values = [entry[0] for entry in new_logprobs]
        return TokenChunk(new_text, new_ids, new_values, new_tops, has_stopped), whole


def count_stop_prefix_chars(text: str, stop: Sequence[str]) -> int:
    """Return the number of characters at the end of `text` that may begin a stop string."""
    longest = 0
    for string in stop:
        for count in range(min(len(string), len(text)), longest, -1):
            if text.endswith(string[:count]):
                longest = count
                break
    return longest


def _decode_reply(server_url: str, answer: bytes) -> _Reply:
    try:
        return _reply_decoder.decode(answer)
    except msgspec.DecodeError as error:
        raise EngineResponseError(f"{server_url} sent an unexpected reply: {error}") from error


def _build_generation(
    server_url: str, text: str, output_ids: list[int], meta: _MetaInfo
) -> Generation:
    reason = meta.finish_reason
    if reason is None:
        raise EngineResponseError(f"{server_url} ended the reply without a finish reason")
    if reason.type == ABORT_FINISH_REASON and reason.status_code is not None:
        if 400 <= reason.status_code < 500:
            raise ProxyRequestError(400, f"SGLang rejected the request: {reason.message}")
        raise _build_abort_exception(server_url, reason.status_code, reason.message)
    if output_ids != [entry[1] for entry in meta.output_token_logprobs]:
        raise EngineResponseError(f"{server_url}: token ids and log-probabilities differ in length")
    spans = [
        VersionSpan(_pack_version(server_url, s.version), s.start, s.end)
        for s in meta.weight_versions
    ]
    covered = 0
    for span in spans:
        if span.start != covered:
            break
        covered = span.end
    if covered != len(output_ids):
        raise EngineResponseError(
            f"{server_url}: weight versions cover only {covered} tokens of the reply"
        )
    return Generation(
        text=text,
        output_ids=output_ids,
        logprobs=[entry[0] for entry in meta.output_token_logprobs],
        spans=spans,
        finish_reason=reason.type,
        ends_with_stop_token=reason.type == "stop" and isinstance(reason.matched, int),
        stop_text=reason.matched if isinstance(reason.matched, str) else None,
        cached_tokens=meta.cached_tokens,
        top_logprobs=meta.output_top_logprobs or [],
        routes=meta.routed_experts or b"",
        **_keep_mask_fields(
            output_ids,
            meta.output_token_sampling_mask or [],
            meta.output_token_sampling_logprobs or [],
        ),
    )


def _keep_mask_fields(
    output_ids: list[int], kept_ids: list[list[int]], kept_logprobs: list[float]
) -> dict[str, Any]:
    if not len(output_ids) == len(kept_ids) == len(kept_logprobs):
        return {}
    if max(map(len, kept_ids), default=0) > MAX_MASK_TOKENS_PER_POSITION:
        return {}
    if not all(sampled in kept for sampled, kept in zip(output_ids, kept_ids, strict=True)):
        return {}
    return {"sampling_mask_ids": kept_ids, "sampling_mask_logprobs": kept_logprobs}


@lru_cache(maxsize=64)
def _pack_version(server_url: str, version: str) -> int:
    try:
        return (
            0 if version == SGLANG_DEFAULT_WEIGHT_VERSION else WeightVersion.parse(version).packed
        )
    except ValueError as error:
        raise EngineResponseError(f"{server_url}: {error}") from error


def _build_error_event_exception(server_url: str, data: bytes) -> Exception:
    try:
        error = _error_decoder.decode(data).error
    except msgspec.DecodeError as broken:
        return EngineResponseError(f"{server_url} sent an unexpected reply: {broken}")
    code, message = error.get("code", 400), error.get("message")
    if code == 400:
        return ProxyRequestError(400, f"SGLang rejected the request: {message}")
    return _build_abort_exception(server_url, code, message)


def _build_abort_exception(server_url: str, status_code: object, message: object) -> Exception:
    kind = UnfinishedEngineCallError if status_code == 503 else EngineResponseError
    return kind(f"{server_url} aborted the generation: {message}")


def extract_error_text(answer: bytes) -> str:
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer[:300].decode(errors="replace")

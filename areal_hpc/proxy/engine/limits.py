"""Limits of calls: replies in flight, turns and tokens of an episode, size of a session, grammars.

SGLang compiles grammars in threads that no abort ends, and a few characters can make each token of
a reply take minutes. No rule finds such grammars, so each one is compiled as a trial first
(`inference/grammar_check.py`): one that would block a replica for all calls never reaches it.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import msgspec

from areal_hpc.errors import ParserLostError, ProxyRequestError
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.engine.tool_parsers import ParserProcessClient
from areal_hpc.proxy.sessions.store import Session

log = logging.getLogger(__name__)

RESERVATION_POLL_S = 0.02


class ConcurrentReplyLimiter:
    def __init__(self, limits: ProxyLimits) -> None:
        self._limits = limits
        self._replies = 0

    def admit(self, session: Session, replies: int) -> None:
        """Count the replies of a call that begins; refuse a call beyond the limits."""
        limits = self._limits
        for count, most, owner in (
            (self._replies, limits.max_concurrent_calls, ""),
            (session.in_flight, limits.max_calls_per_session, " of this session"),
        ):
            if count + replies > most:
                problem = f"too many model calls{owner} in flight (limit {most})"
                raise ProxyRequestError(429, problem)
        refuse_oversized_session(session, limits)
        self._replies += replies
        session.in_flight += replies

    def release(self, session: Session, replies: int, reserved_tokens: int = 0) -> None:
        """Stop counting replies that ended, and release their `reserved_tokens`."""
        self._replies -= replies
        session.in_flight -= replies
        session.reserved_tokens -= reserved_tokens
        session.touch()


def refuse_oversized_session(session: Session, limits: ProxyLimits) -> None:
    """Refuse a call of a session that has recorded too much."""
    if session.recorded_bytes >= limits.max_session_bytes:
        problem = f"this session has recorded {session.recorded_bytes} bytes"
        hint = f"a session may record {limits.max_session_bytes}: open another one"
        raise ProxyRequestError(400, problem, key="session", hint=hint)


def refuse_call_beyond_limits(session: Session, choices: int) -> None:
    """Refuse a call beyond the episode's turns or tokens; its replies are in flight already."""
    limits = session.request.limits
    if limits.max_turns:
        turns = len(session.tree) + session.unrecorded_replies.total()
        turns += session.in_flight - choices
        if turns + choices > limits.max_turns:
            problem = f"this episode may have {limits.max_turns} turns, {turns} were taken"
            raise ProxyRequestError(400, problem, key="limits.max_turns")
    if limits.max_tokens and session.sampled_tokens >= limits.max_tokens:
        raise _build_tokens_spent_error(session)


async def reserve_reply_tokens_per_choice(
    session: Session, sampling: SamplingParams, choices: int, give_up_at: float
) -> tuple[SamplingParams, int]:
    """Cut the reply limit to the session's tokens; also return the reserved tokens of each choice.

    They are part of the session's `reserved_tokens` until the reply ends; without a limit there are
    none. If calls in flight may sample the tokens that this one requests, it waits for their end:
    only sampled tokens shorten a reply, as if the calls had come one after another.
    """
    most = session.request.limits.max_tokens
    if not most:
        return sampling, 0
    requested = sampling.max_new_tokens

    def count_free() -> int:
        return most - session.sampled_tokens - session.reserved_tokens

    while session.reserved_tokens and count_free() < requested * choices:
        if time.monotonic() >= give_up_at:
            problem = "calls under way may sample all the tokens that this episode has left"
            raise ProxyRequestError(503, problem, key="limits.max_tokens")
        await asyncio.sleep(RESERVATION_POLL_S)
    limit = min(requested, count_free() // choices)
    if limit < 1:
        raise _build_tokens_spent_error(session, choices)
    session.reserved_tokens += limit * choices
    least = min(sampling.min_new_tokens, limit)
    return msgspec.structs.replace(sampling, max_new_tokens=limit, min_new_tokens=least), limit


def _build_tokens_spent_error(session: Session, choices: int = 1) -> ProxyRequestError:
    most, sampled = session.request.limits.max_tokens, session.sampled_tokens
    problem = f"this episode may sample {most} tokens, {sampled} were sampled"
    if sampled < most:
        problem += f": {most - sampled} are left, for {choices} replies"
    return ProxyRequestError(400, problem, key="limits.max_tokens")


MAX_CHARS_BY_KIND = {
    "regex": 4096,
    "ebnf": 32768,
    "json_schema": 131_072,
    "structural_tag": 262_144,
}
MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_STOP_TOKENS, MAX_LOGIT_BIASES = 128, 1024, 1024, 16_384
MAX_COMPILING_GRAMMARS_PER_SESSION = 4
MAX_KNOWN_GRAMMARS = 16_384
LANES = ((1, 4), (5, 1))
"""Processor time of a trial in seconds, and concurrent trials, by lane. A grammar that takes longer
than the first lane allows waits in the second one, where it delays only others like it."""

_REQUEST_KEY_BY_GRAMMAR = {"json_schema": "response_format", "structural_tag": "tools"}
"""Parameters of requests that become these grammars; others keep their names."""


def refuse_costly_sampling(sampling: SamplingParams) -> None:
    names = sampling.active_grammar_names
    if not (names or sampling.stop or sampling.stop_token_ids or sampling.logit_bias):
        return
    stops = sampling.stop or ()
    for key, count, most in (
        ("stop", len(stops), MAX_STOP_STRINGS),
        ("stop", max(map(len, stops), default=0), MAX_STOP_CHARS),
        ("stop_token_ids", len(sampling.stop_token_ids or ()), MAX_STOP_TOKENS),
        ("logit_bias", len(sampling.logit_bias or ()), MAX_LOGIT_BIASES),
    ):
        if count > most:
            raise ProxyRequestError(400, f"{key} is too large: {count} (limit {most})", key=key)
    for name in names:
        chars, most = len(getattr(sampling, name)), MAX_CHARS_BY_KIND[name]
        if chars > most:
            raise _build_grammar_refusal(name, f"it has {chars} characters (limit {most})")


class GrammarChecks:
    """Trials of grammars in the parser process, before a replica gets them, and their results.

    Without `parsers` there are no trials. If the process does not start, `is_required` refuses
    grammars; else, as in a standalone proxy, replicas get them without a trial.
    """

    def __init__(
        self,
        parsers: ParserProcessClient | None,
        timeout_s: float = 600.0,
        *,
        is_required: bool = False,
    ) -> None:
        self._parsers = parsers
        self._timeout_s = timeout_s
        self._is_required = is_required
        self._problems: dict[bytes, str] = {}
        """Results by digest, oldest first; empty for a grammar that replicas may get."""
        self._trying: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        """Locks by digest, while a call waits: each grammar has one trial."""
        self._lanes = [(cpu_s, asyncio.Semaphore(trials)) for cpu_s, trials in LANES]

    async def refuse_costly_grammar(self, session: Session, sampling: SamplingParams) -> None:
        parsers = self._parsers
        if parsers is None or not sampling.active_grammar_names:
            return
        name = sampling.active_grammar_names[0]
        text = getattr(sampling, name)
        digest = hashlib.blake2b(f"{name}={text}".encode(), digest_size=16).digest()
        if digest not in self._problems:
            try:
                with _hold_slot(session, digest):
                    async with (
                        asyncio.timeout(self._timeout_s),
                        self._trying.setdefault(digest, asyncio.Lock()),
                    ):
                        if digest not in self._problems:
                            await self._try_in_lanes(parsers, digest, name, text)
            except TimeoutError:
                problem = f"the grammar was not tried within {self._timeout_s:g} s: others wait too"
                raise ProxyRequestError(503, problem) from None
            except ParserLostError as error:
                raise ProxyRequestError(503, str(error)) from error
        if reason := self._problems.get(digest):
            raise _build_grammar_refusal(name, reason)

    async def _try_in_lanes(
        self, parsers: ParserProcessClient, digest: bytes, grammar_kind: str, text: str
    ) -> None:
        try:
            await parsers.start()
        except (ParserLostError, OSError) as error:
            if self._is_required:
                raise ParserLostError(f"grammars cannot be tried: {error}") from error
            log.warning("replicas get grammars that were not tried: %s", error)
            self._parsers = None  # as in a standalone proxy without SGLang
            return
        problem = ""
        for cpu_s, lane in self._lanes:
            async with lane:
                problem = await parsers.find_grammar_cost(grammar_kind, text, cpu_s)
            if not problem:
                break
        self._problems[digest] = problem
        while len(self._problems) > MAX_KNOWN_GRAMMARS:
            del self._problems[next(iter(self._problems))]


@contextmanager
def _hold_slot(session: Session, digest: bytes) -> Iterator[None]:
    new, most = session.new_grammars, MAX_COMPILING_GRAMMARS_PER_SESSION
    if digest not in new and len(new) >= most:
        raise ProxyRequestError(429, f"{most} new grammars of this session are being compiled")
    new[digest] += 1
    try:
        yield
    finally:
        new[digest] -= 1
        if not new[digest]:
            del new[digest]


def _build_grammar_refusal(grammar_kind: str, problem: str) -> ProxyRequestError:
    key = _REQUEST_KEY_BY_GRAMMAR.get(grammar_kind, grammar_kind)
    return ProxyRequestError(400, f"the grammar takes too long to compile: {problem}", key=key)

"""Limits of calls: replies in flight, turns and tokens of an episode, size of a session."""

import asyncio
import time

import msgspec

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.config import ProxyLimits
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.proxy.sessions.store import Session

RESERVATION_POLL_S = 0.02


class ConcurrentReplyLimiter:
    def __init__(self, limits: ProxyLimits) -> None:
        self._limits = limits
        self._replies = 0

    def admit(self, session: Session, replies: int) -> None:
        """Count a call that has begun: a session is not idle while the model answers it."""
        limits = self._limits
        for count, most, whose in (
            (self._replies, limits.max_concurrent_calls, ""),
            (session.in_flight, limits.max_calls_per_session, " of this session"),
        ):
            if count + replies > most:
                problem = f"too many model calls{whose} in flight (limit {most})"
                raise ProxyRequestError(429, problem)
        refuse_oversized_session(session, limits)
        self._replies += replies
        session.in_flight += replies

    def release(self, session: Session, replies: int, reserved_tokens: int = 0) -> None:
        """Replies have come to their end; `reserved_tokens` of the session were theirs."""
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
    """Cut the reply limit to the session's tokens; also say how many each choice got.

    Those are among the session's `reserved_tokens` until the reply has ended; there are none
    without a limit. Where calls under way may sample what this one asks for, it waits for them to
    end: so replies are cut by what was sampled, as if the calls had come one after another.
    """
    most = session.request.limits.max_tokens
    if not most:
        return sampling, 0
    wanted = sampling.max_new_tokens

    def count_free() -> int:
        return most - session.sampled_tokens - session.reserved_tokens

    while session.reserved_tokens and count_free() < wanted * choices:
        if time.monotonic() >= give_up_at:
            problem = "calls under way may sample all the tokens that this episode has left"
            raise ProxyRequestError(503, problem, key="limits.max_tokens")
        await asyncio.sleep(RESERVATION_POLL_S)
    limit = min(wanted, count_free() // choices)
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

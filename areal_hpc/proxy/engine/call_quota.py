"""Replies that are generated at once, of all sessions and of each."""

from collections.abc import Iterator
from contextlib import contextmanager

from areal_hpc.errors import ProxyRequestError
from areal_hpc.proxy.sessions.store import Session
from areal_hpc.recipe.sections.proxy_and_shards import ProxyConfig


class ConcurrentReplyLimiter:
    def __init__(self, limits: ProxyConfig) -> None:
        self._limits = limits
        self._replies = 0

    def admit(self, session: Session, replies: int) -> None:
        """Count a call that has begun: a session is not idle while the model answers it."""
        limits = self._limits
        if self._replies + replies > limits.max_concurrent_calls:
            most = limits.max_concurrent_calls
            raise ProxyRequestError(429, f"too many model calls in flight (limit {most})")
        if session.in_flight + replies > limits.max_calls_per_session:
            most = limits.max_calls_per_session
            raise ProxyRequestError(
                429, f"too many model calls of this session in flight (limit {most})"
            )
        refuse_oversized_session(session, limits)
        self._replies += replies
        session.in_flight += replies

    def release(self, session: Session, replies: int, reserved_tokens: int = 0) -> None:
        """Replies have come to their end; `reserved_tokens` of the session were theirs."""
        self._replies -= replies
        session.in_flight -= replies
        session.reserved_tokens -= reserved_tokens
        session.touch()

    @contextmanager
    def hold_slots(self, session: Session, replies: int) -> Iterator[None]:
        self.admit(session, replies)
        try:
            yield
        finally:
            self.release(session, replies)


def refuse_oversized_session(session: Session, limits: ProxyConfig) -> None:
    """Demand that the session has room for more records."""
    if session.recorded_bytes >= limits.max_session_bytes:
        problem = f"this session has recorded {session.recorded_bytes} bytes"
        hint = f"raise proxy.max_session_bytes, which is {limits.max_session_bytes}"
        raise ProxyRequestError(400, problem, key="proxy.max_session_bytes", hint=hint)

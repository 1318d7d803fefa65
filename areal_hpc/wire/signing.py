"""Signatures of requests between the run's services: the key that makes them never travels.

A request carries, as its `Authorization`,

    AREAL-HMAC-SHA256 <Unix time in ms> <nonce> <SHA-256 of the body> <signature>

and the signature is an HMAC-SHA256 over method, path with query, the body's digest, the time and
the nonce. Its key is derived from the run's service key and the name of the service that is asked:
what was signed for one opens no other. As the header has the body's digest, a server knows before
it reads the body whether it comes from the run.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, MutableMapping
from typing import Any

log = logging.getLogger(__name__)

MAX_CLOCK_SKEW_S = 60.0
"""Between the clocks of two nodes, with the time that a request is under way. The check of nodes
(`jobs/node/node_probe.py`) refuses those whose clocks are off by half of that."""
SKEW_WARNING_S, SKEW_WARNING_PERIOD_S = 10.0, 60.0
CLOCK_SKEW_STATUS = 425
"""Answers a sound signature of another time: a client that was stopped meanwhile signs anew."""
UNSIGNED_STATUS = 401
SCHEME = "AREAL-HMAC-SHA256"
_HEADER_PATTERN = re.compile(
    rf"{SCHEME} (?P<time_ms>[0-9]{{1,16}}) (?P<nonce>[0-9a-f]{{32}})"
    r" (?P<body>[0-9a-f]{64}) (?P<signature>[0-9a-f]{64})"
)
_NONCE_BYTES = 16


class SignatureError(Exception):
    """A request that is not, or not now, one of the run's; `status_code` is the HTTP answer."""

    def __init__(self, status_code: int, text: str) -> None:
        super().__init__(text)
        self.status = status_code


def claims_to_be_signed(asgi_scope: MutableMapping[str, Any]) -> bool:
    return _read_authorization(asgi_scope).startswith(SCHEME)


def _read_authorization(asgi_scope: MutableMapping[str, Any]) -> str:
    given: bytes = next(
        (value for name, value in asgi_scope["headers"] if name == b"authorization"), b""
    )
    return given.decode("latin-1")


class RequestSigner:
    """Signs requests to the service `service` of a run."""

    def __init__(
        self, service_key: str, service: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = _derive_key(service_key, service)
        self._clock = clock

    def sign(self, method: str, target: str, body: bytes | None) -> str:
        """The `Authorization` of a request; `target` is its path with the query."""
        signed = [
            str(int(self._clock() * 1000)),
            secrets.token_hex(_NONCE_BYTES),
            hashlib.sha256(body or b"").hexdigest(),
        ]
        return " ".join([SCHEME, *signed, _compute_signature(self._key, method, target, *signed)])


class RequestVerifier:
    """Tells requests that were signed for the service `service` of a run from all others.

    A request is taken once. Which ones have been here is remembered as long as their time would
    let them in again; a service that starts anew has forgotten it.
    """

    def __init__(
        self, service_key: str, service: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._key = _derive_key(service_key, service)
        self._clock = clock
        self._forget_at: dict[str, float] = {}
        """By nonce, those that came first at first."""
        self._warned_at = float("-inf")

    def verify_head_once_and_get_digest(self, asgi_scope: MutableMapping[str, Any]) -> str:
        """The SHA-256 that the body of an ASGI request must have (`check_body_digest`).

        Raises:
            SignatureError: It is not signed, its time is not now, or it has been here before.
        """
        found = _HEADER_PATTERN.fullmatch(_read_authorization(asgi_scope))
        if found is None:
            text = f"expected a request signed with the run's service key ({SCHEME})"
            raise SignatureError(UNSIGNED_STATUS, f"{text}; no key opens this route by itself")
        target = asgi_scope.get("raw_path") or asgi_scope["path"].encode()
        if query := asgi_scope.get("query_string"):
            target += b"?" + query
        signed = (found["time_ms"], found["nonce"], found["body"])
        expected = _compute_signature(
            self._key, asgi_scope["method"], target.decode("latin-1"), *signed
        )
        if not hmac.compare_digest(expected, found["signature"]):
            raise SignatureError(UNSIGNED_STATUS, "the signature is not of this run and service")
        self._check_time(int(found["time_ms"]) / 1000, asgi_scope)
        self._refuse_repeated_nonce(found["nonce"])
        return found["body"]

    def _check_time(self, signed_at: float, asgi_scope: MutableMapping[str, Any]) -> None:
        now = self._clock()
        ahead_s = signed_at - now
        side = "after" if ahead_s > 0 else "before"
        when = f"was signed {abs(ahead_s):.0f} s {side} this node's time"
        if abs(ahead_s) > MAX_CLOCK_SKEW_S:
            limit = f"expected {MAX_CLOCK_SKEW_S:.0f} s at most"
            raise SignatureError(
                CLOCK_SKEW_STATUS,
                f"the request {when}, {limit}; set the nodes' clocks (NTP, chrony)",
            )
        if abs(ahead_s) > SKEW_WARNING_S and now - self._warned_at > SKEW_WARNING_PERIOD_S:
            self._warned_at = now
            client = (asgi_scope.get("client") or ("?",))[0]
            log.warning("a request from %s %s: do the nodes' clocks differ?", client, when)

    def _refuse_repeated_nonce(self, nonce: str) -> None:
        now = self._clock()
        while self._forget_at:
            oldest = next(iter(self._forget_at))
            if self._forget_at[oldest] >= now:
                break
            del self._forget_at[oldest]
        if nonce in self._forget_at:
            raise SignatureError(UNSIGNED_STATUS, "this very request has been here before")
        self._forget_at[nonce] = now + 2 * MAX_CLOCK_SKEW_S


def check_body_digest(body: bytes, sha256: str) -> None:
    """Compare a body with what was signed.

    Raises:
        SignatureError: It is another one.
    """
    if not hmac.compare_digest(hashlib.sha256(body).hexdigest(), sha256):
        raise SignatureError(UNSIGNED_STATUS, "the body is not the one that was signed")


def _derive_key(service_key: str, service: str) -> bytes:
    return hmac.digest(service_key.encode(), f"areal_hpc requests to {service}".encode(), "sha256")


def _compute_signature(
    key: bytes, method: str, target: str, time_ms: str, nonce: str, body_sha256: str
) -> str:
    text = "\n".join((method, target, body_sha256, time_ms, nonce))
    return hmac.digest(key, text.encode("latin-1"), "sha256").hex()

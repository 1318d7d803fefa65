"""Signatures of requests made wrong in every way: none of them may open a route."""

import random
from collections.abc import Callable
from copy import copy
from typing import Literal, get_args

from areal_hpc.wire.signing import (
    CLOCK_SKEW_STATUS,
    MAX_CLOCK_SKEW_S,
    SCHEME,
    UNSIGNED_STATUS,
    RequestSigner,
)

SignatureDefect = Literal[
    "sound",
    "repeated",
    "of another method",
    "of another route",
    "of another body",
    "of another run",
    "of another time",
    "time changed",
    "nonce changed",
    "digest changed",
    "signature changed",
    "part missing",
    "cut short",
    "upper case",
    "odd text",
    "a bearer key",
    "missing",
]
"""`repeated`: the signature is sound, and the request has been here before."""
DEFECTS: tuple[SignatureDefect, ...] = get_args(SignatureDefect)[1:]
_ODD_TEXTS = ("", SCHEME, f"{SCHEME} ", f"{SCHEME} 0 0 0 0", f"{SCHEME} " + "0" * 5000, "\xe9\xff")
_CHANGED_PARTS = {
    "time changed": 1,
    "nonce changed": 2,
    "digest changed": 3,
    "signature changed": 4,
}
"""Place of a part among the words of the header."""


def is_refused(status: str, defect: SignatureDefect) -> bool:
    """True if that is an answer to a signature with that defect: it comes before all others."""
    if defect == "odd text" and status == "400":
        return True  # the header is none of HTTP
    return status == (
        str(CLOCK_SKEW_STATUS) if defect == "of another time" else str(UNSIGNED_STATUS)
    )


def sign(
    signer: RequestSigner,
    method: str,
    path: str,
    content: bytes,
    defect: SignatureDefect,
    chance: random.Random,
) -> str | None:
    """The `Authorization` of a request with that defect; None if it has none."""
    sound = signer.sign(method, path, content)
    if defect in _CHANGED_PARTS:
        return _change_digit(sound, _CHANGED_PARTS[defect], chance)
    spoiled: dict[SignatureDefect, Callable[[], str | None]] = {
        "of another method": lambda: signer.sign(
            "GET" if method != "GET" else "PUT", path, content
        ),
        "of another route": lambda: signer.sign(method, f"{path}/other", content),
        "of another body": lambda: signer.sign(method, path, content + b" "),
        "of another run": lambda: _of_another_run(method, path, content, chance),
        "of another time": lambda: _of_another_time(signer, method, path, content, chance),
        "part missing": lambda: _without_a_part(sound, chance),
        "cut short": lambda: sound[: -chance.randint(1, 60)],
        "upper case": lambda: f"{SCHEME} {sound.removeprefix(SCHEME).strip().upper()}",
        "odd text": lambda: chance.choice(_ODD_TEXTS),
        "a bearer key": lambda: f"Bearer {sound.split()[-1]}",
        "missing": lambda: None,
    }
    return spoiled[defect]() if defect in spoiled else sound


def _of_another_run(method: str, path: str, content: bytes, chance: random.Random) -> str:
    service = chance.choice(("ledger", "proxy-cell-0", "control-cell-0"))
    return RequestSigner("k" * 43, service).sign(method, path, content)


def _of_another_time(
    signer: RequestSigner, method: str, path: str, content: bytes, chance: random.Random
) -> str:
    other = copy(signer)
    off_s = chance.choice((-1, 1)) * chance.choice((1.5, 60, 1e6)) * MAX_CLOCK_SKEW_S
    now = signer._clock()
    other._clock = lambda: max(0.0, now + off_s)
    return other.sign(method, path, content)


def _change_digit(sound: str, part: int, chance: random.Random) -> str:
    words = sound.split()
    digits = [*words[part]]
    place = chance.randrange(len(digits))
    digits[place] = chance.choice([one for one in "0123456789" if one != digits[place]])
    words[part] = "".join(digits)
    return " ".join(words)


def _without_a_part(sound: str, chance: random.Random) -> str:
    words = sound.split()
    del words[chance.randrange(len(words))]
    return " ".join(words)

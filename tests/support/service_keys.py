"""A run's service key, for stand-ins; and keys with every defect: none may open a route."""

import random
import string
from collections.abc import Sequence
from typing import Literal, get_args

from areal_hpc.rundir.rendezvous import derive_bearer_key, generate_service_key

SERVICE_KEY = generate_service_key()
OTHER_SERVICE_KEY = generate_service_key()
"""Service key of another run."""
KeyDefect = Literal[
    "none",
    "missing",
    "of another service",
    "of another run",
    "no bearer",
    "cut short",
    "changed",
    "upper case",
    "odd text",
    "over plain HTTP",
]
DEFECTS: tuple[KeyDefect, ...] = get_args(KeyDefect)[1:]
_ODD_TEXTS = ("", "Bearer", "Bearer ", "Bearer " + "0" * 64, "Bearer " + "0" * 5000, "\xe9\xff")


def is_refused(status: str, defect: KeyDefect) -> bool:
    """Check for the refusal of a key with that defect, which comes before all other answers."""
    if defect == "over plain HTTP":
        return status == "closed"
    return status == "401" or (defect == "odd text" and status == "400")  # it is none of HTTP


def spoil_authorization(
    key: str, defect: KeyDefect, chance: random.Random, keys_of_run: Sequence[str]
) -> str | None:
    """The `Authorization` header of a request with that defect; None if there is none."""
    match defect:
        case "missing":
            return None
        case "of another service":
            return f"Bearer {chance.choice([other for other in keys_of_run if other != key])}"
        case "of another run":
            service = chance.choice(("ledger", "proxy-cell-0", "control-cell-0"))
            return f"Bearer {derive_bearer_key(OTHER_SERVICE_KEY, service)}"
        case "no bearer":
            return key
        case "cut short":
            return f"Bearer {key[: -chance.randint(1, 60)]}"
        case "changed":
            position = chance.randrange(len(key))
            other = chance.choice(string.hexdigits.replace(key[position], ""))
            return f"Bearer {key[:position]}{other}{key[position + 1 :]}"
        case "upper case":
            return f"Bearer {key.upper()}"
        case "odd text":
            return chance.choice(_ODD_TEXTS)
    return f"Bearer {key}"

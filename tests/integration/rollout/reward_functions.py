"""Reward functions with every behavior, which processes import by name."""

import os
import time
from pathlib import Path


def is_equal(result: str, answer: str) -> float:
    return 1.0 if result == answer else 0.0


def always_true(**anything: object) -> bool:
    return True


def waits(sign: str, note: str) -> float:
    with Path(note).open("a") as file:
        file.write(f"{os.getpid()}\n")
    while not Path(sign).exists():
        time.sleep(0.01)
    return 1.0


def raises(note: str, times: int) -> float:
    with Path(note).open("a") as file:
        file.write(f"{os.getpid()}\n")
    if len(Path(note).read_text().splitlines()) <= times:
        raise ValueError("not yet")
    return 0.5


def dies(note: str, times: int) -> float:
    try:
        return raises(note, times)
    except ValueError:
        os._exit(3)


def asks_in_vain() -> float:
    raise TimeoutError("the judge did not answer")

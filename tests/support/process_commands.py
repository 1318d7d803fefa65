"""What processes were started as."""

from __future__ import annotations

import psutil


def command_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended, waited for or not."""
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.NoSuchProcess:  # zombies are a kind of these
        return []


def is_scheduler(process: psutil.Process) -> bool:
    """True of the process of an SGLang server that runs the model."""
    return " ".join(command_of(process)).startswith("sglang::scheduler")

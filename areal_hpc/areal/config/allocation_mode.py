"""AReaL's notation of parallel layouts (`sglang:d4t2`, `megatron:(attn:d4p2|ffn:d2e4)`), read."""

from __future__ import annotations

import re
from typing import Any

from areal_hpc.areal_config.rules import Lost, Source

ENGINES = ("sglang", "vllm")
TRAINERS = ("fsdp", "megatron", "archon")
_SIZES = re.compile(r"([dtpcse])(\d+)")


def of_allocation_mode(value: Any, source: Source) -> dict[str, Any] | Lost:
    """The older notation that holds both parts: `sglang:d4+megatron:d4`, or `sglang.d4+d4`."""
    if not value:
        return {}
    generating, plus, training = str(value).partition("+")
    if not plus:
        return Lost("one part only: a recipe has replicas and trainer ranks, side by side")
    if not _kind(training):
        training = f"fsdp:{training}"
    found: dict[str, Any] = {}
    for part in (of_engine(generating, source), of_trainer(training, source)):
        if isinstance(part, Lost):
            return part
        found |= part
    return found


def of_engine(value: Any, source: Source) -> dict[str, Any] | Lost:
    """`rollout.backend`: as many replicas in a cell as a node has GPUs for, one cell a node."""
    if not value:
        return {}
    if _kind(str(value)) == "vllm":
        return Lost("SGLang serves here: write sglang")
    sizes = _sizes(str(value))
    if sizes is None or _kind(str(value)) not in ("sglang", ""):
        return Lost("not a layout of the form sglang:d4t2")
    if sizes.get("p", 1) > 1:
        return Lost("a replica is not split over pipeline stages: use t")
    tp, replicas = sizes.get("t", 1), sizes.get("d", 1)
    per_node = max(1, int(source("cluster.n_gpus_per_node") or 1) // tp)
    per_cell = next(n for n in range(min(per_node, replicas), 0, -1) if replicas % n == 0)
    return {
        "inference.cells": replicas // per_cell,
        "inference.replicas_per_cell": per_cell,
        "inference.tp": tp,
    }


def of_trainer(value: Any, source: Source) -> dict[str, Any] | Lost:
    """`actor.backend`: FSDP's and Archon's ranks become Megatron's."""
    if not value:
        return {}
    if _kind(str(value)) not in TRAINERS:
        return Lost(f"not a layout of one of {', '.join(TRAINERS)}")
    hybrid = re.search(r"attn:([^|)]+)\|ffn:([^)]+)", str(value))
    sizes = _sizes(hybrid[1] if hybrid else str(value))
    experts = _sizes(hybrid[2]) if hybrid else sizes
    if sizes is None or experts is None:
        return Lost("not a layout of the form megatron:d4t2p2c1e1")
    if "s" in sizes:
        return Lost("Megatron's sequence parallelism comes with t: leave s out")
    if hybrid and experts.get("t", 1) != 1:
        return Lost("experts are not split by tensors of their own: use e for them")
    parallel = {"dp": "d", "tp": "t", "pp": "p", "cp": "c"}
    found = {f"trainer.parallel.{name}": sizes.get(letter, 1) for name, letter in parallel.items()}
    return {**found, "trainer.parallel.ep": experts.get("e", 1)}


def _kind(text: str) -> str:
    """The backend's name before the sizes."""
    match = re.match(r"\s*([a-z]+)\s*[:.]", text)
    return match[1] if match and match[1] in (*ENGINES, *TRAINERS) else ""


def _sizes(text: str) -> dict[str, int] | None:
    """Letter -> size; None if the text is no layout."""
    letters = re.sub(r"^[a-z]+[:.]", "", text.strip()).strip("() ")
    if not re.fullmatch(rf"(?:{_SIZES.pattern})+", letters):
        return None
    return {letter: int(size) for letter, size in _SIZES.findall(letters)}

"""Parser of AReaL's allocation modes (`sglang:d4t2+megatron:d4`)."""

import re
from typing import Any

from areal_hpc.areal.config.rules import ArealConfigValues, Untranslatable

ENGINE_NAMES = ("sglang", "vllm")
TRAINER_NAMES = ("fsdp", "megatron", "archon")
_SIZE_PATTERN = re.compile(r"([dtpcse])(\d+)")


def parse_allocation_mode(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    """The older notation that holds both parts: `sglang:d4+megatron:d4`, or `sglang.d4+d4`."""
    if not value:
        return {}
    generating, plus, training = str(value).partition("+")
    if not plus:
        return Untranslatable(
            "one part only: a recipe has replicas and trainer ranks, side by side"
        )
    if not _parse_backend_name(training):
        training = f"fsdp:{training}"
    found: dict[str, Any] = {}
    for part in (
        parse_engine_backend(generating, areal_values),
        parse_trainer_backend(training, areal_values),
    ):
        if isinstance(part, Untranslatable):
            return part
        found |= part
    return found


def parse_engine_backend(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    """`rollout.backend`: as many replicas in a cell as a node has GPUs for, one cell a node."""
    if not value:
        return {}
    if _parse_backend_name(str(value)) == "vllm":
        return Untranslatable("SGLang serves here: write sglang")
    sizes = _parse_sizes(str(value))
    if sizes is None or _parse_backend_name(str(value)) not in ("sglang", ""):
        return Untranslatable("not a layout of the form sglang:d4t2")
    if sizes.get("p", 1) > 1:
        return Untranslatable("a replica is not split over pipeline stages: use t")
    tp, replicas = sizes.get("t", 1), sizes.get("d", 1)
    replicas_per_node = max(1, int(areal_values("cluster.n_gpus_per_node") or 1) // tp)
    per_cell = next(n for n in range(min(replicas_per_node, replicas), 0, -1) if replicas % n == 0)
    return {
        "inference.cells": replicas // per_cell,
        "inference.replicas_per_cell": per_cell,
        "inference.tp": tp,
    }


def parse_trainer_backend(
    value: Any, areal_values: ArealConfigValues
) -> dict[str, Any] | Untranslatable:
    """`actor.backend`: FSDP's and Archon's ranks become Megatron's."""
    if not value:
        return {}
    if _parse_backend_name(str(value)) not in TRAINER_NAMES:
        return Untranslatable(f"not a layout of one of {', '.join(TRAINER_NAMES)}")
    hybrid = re.search(r"attn:([^|)]+)\|ffn:([^)]+)", str(value))
    sizes = _parse_sizes(hybrid[1] if hybrid else str(value))
    experts = _parse_sizes(hybrid[2]) if hybrid else sizes
    if sizes is None or experts is None:
        return Untranslatable("not a layout of the form megatron:d4t2p2c1e1")
    if "s" in sizes:
        return Untranslatable("Megatron's sequence parallelism comes with t: leave s out")
    if hybrid and experts.get("t", 1) != 1:
        return Untranslatable("experts are not split by tensors of their own: use e for them")
    parallel = {"dp": "d", "tp": "t", "pp": "p", "cp": "c"}
    found = {f"trainer.parallel.{name}": sizes.get(letter, 1) for name, letter in parallel.items()}
    return {**found, "trainer.parallel.ep": experts.get("e", 1)}


def _parse_backend_name(text: str) -> str:
    match = re.match(r"\s*([a-z]+)\s*[:.]", text)
    return match[1] if match and match[1] in (*ENGINE_NAMES, *TRAINER_NAMES) else ""


def _parse_sizes(text: str) -> dict[str, int] | None:
    letters = re.sub(r"^[a-z]+[:.]", "", text.strip()).strip("() ")
    if not re.fullmatch(rf"(?:{_SIZE_PATTERN.pattern})+", letters):
        return None
    return {letter: int(size) for letter, size in _SIZE_PATTERN.findall(letters)}

"""Checksums that SGLang's `/weights_checker` must answer when every byte arrived.

Reproduced from sglang 0.5.23: `srt/utils/weight_checker.py` hashes each tensor the server
holds, under the server's own names (q/k/v fused to `qkv_proj`, gate/up to `gate_up_proj`,
vocabulary rows padded to a multiple of 64) and after tensor-parallel slicing. On a CPU
replica the hash is the first eight bytes of SHA-256; on a GPU it is the tiled word hash of
`kernels/ops/memory/gpu_tensor_hash.py`. Comparing what the server holds, and not what it
received, also catches a loader that puts right bytes in the wrong place.

Experts of mixtures are stacked (`expert_hashes.py`). On a GPU their layout depends on the kernel
that SGLang chose, so a kind of which every tensor differs is not compared there.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence, Set
from importlib.util import find_spec

import torch

from areal_hpc.errors import WeightSyncError
from areal_hpc.weights.buckets.plan import get_fused_name

log = logging.getLogger(__name__)

_VOCABULARY_PADDING = 64  # DEFAULT_VOCAB_PADDING_SIZE of SGLang's vocab_parallel_embedding.py
_MAX_NAMES_IN_ERROR = 4
_FUSED_ORDER = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
_WORD_MASK = (1 << 32) - 1
_SEED = 0x243F6A88
_HASH_HALF_CONSTANTS: tuple[tuple[int, int, int], tuple[int, int, int]] = (
    (_SEED, 0x27D4EB2D, 15),
    (((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _WORD_MASK, 0x165667B1, 13),
)
"""(seed, factor, turn) of the high and the low 32 bits of the hash on a GPU."""
_TILE_WORDS = 8192
_TILE_BYTES = 4 * _TILE_WORDS

AcceptableHashesByTensor = dict[str, frozenset[str]]
"""For each of the server's tensors the acceptable hashes (several where KV heads are repeated)."""


def compute_non_expert_rank_digests(
    tensors: Mapping[str, torch.Tensor], tp_rank: int, tp: int, replica_device: str
) -> AcceptableHashesByTensor:
    """Hashes that rank `tp_rank` of `tp` must report after loading `tensors`.

    Those are in Hugging Face naming, with complete fused sets. `replica_device`, `cpu` or `cuda`,
    decides the kind of hash.
    """
    fused: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if not is_expert_parameter(name):
            fused.setdefault(get_fused_name(name), []).append((name, tensor))
    return {
        name: frozenset(
            _hash_pieces(pieces, replica_device)
            for pieces in _list_rank_piece_alternatives(name, parts, tp_rank, tp)
        )
        for name, parts in fused.items()
    }


def is_expert_parameter(parameter_name: str) -> bool:
    return ".experts." in parameter_name


def require_matching_comparable_checksums(
    expected: AcceptableHashesByTensor,
    reported_checksums: Mapping[str, str],
    replica_name: str,
    *,
    replica_device: str = "cpu",
) -> None:
    """Check one rank's report.

    Raises:
        WeightSyncError: A tensor differs, or only one side has it.
    """
    different = {
        name
        for name in expected.keys() & reported_checksums.keys()
        if reported_checksums[name] not in expected[name]
    }
    elsewhere = _find_expert_kinds_in_other_layouts(
        expected, reported_checksums, different, replica_device
    )
    if elsewhere:
        log.warning(
            "%s: the checksums of %s are not compared: none agrees, as where a kernel has them in "
            "a layout of its own; the log-probability drift of each step shows if they are wrong",
            replica_name,
            ", ".join(sorted(elsewhere)),
        )
    server_names = {name for name in reported_checksums if _get_expert_kind(name) not in elsewhere}
    sent_names = {name for name in expected if _get_expert_kind(name) not in elsewhere}
    missing, unsent = sorted(sent_names - server_names), sorted(server_names - sent_names)
    different = different & server_names
    if not (missing or unsent or different):
        return
    shown = sorted(different)
    all_differ = len(different) == len(server_names)
    hint = "give trainer.dtype and inference.dtype the same value"
    raise WeightSyncError(
        f"{replica_name}: expected the sent weights, got {len(different)} different "
        f"{shown[:_MAX_NAMES_IN_ERROR]}, {len(missing)} unknown to the server "
        f"{missing[:_MAX_NAMES_IN_ERROR]}, {len(unsent)} never sent {unsent[:_MAX_NAMES_IN_ERROR]}",
        hint=hint if all_differ else "resend all weights",
    )


def _find_expert_kinds_in_other_layouts(
    expected: AcceptableHashesByTensor,
    reported_checksums: Mapping[str, str],
    differing_names: Set[str],
    replica_device: str,
) -> frozenset[str]:
    if replica_device == "cpu":
        return frozenset()
    agreeing = {
        _get_expert_kind(name)
        for name in expected.keys() & reported_checksums.keys()
        if name not in differing_names
    }
    kinds = {_get_expert_kind(name) for name in [*expected, *reported_checksums]}
    return frozenset(kinds - agreeing - {""})


def _get_expert_kind(tensor_name: str) -> str:
    return tensor_name.partition(".experts.")[2]


def _list_rank_piece_alternatives(
    parameter_name: str, named_parts: list[tuple[str, torch.Tensor]], tp_rank: int, tp: int
) -> list[list[torch.Tensor]]:
    if parameter_name.startswith(("model.embed_tokens.", "lm_head.")):
        table, multiple = named_parts[0][1], _VOCABULARY_PADDING
        rows = table.shape[0]
        if -(-rows // multiple) * multiple % tp:
            multiple *= tp
        if padding := -rows % multiple:
            table = torch.nn.functional.pad(table, (0, 0, 0, padding))
        return [[slice_for_rank(table, 0, tp_rank, tp)]]
    if parameter_name.endswith((".o_proj.weight", ".down_proj.weight")):
        return [[slice_for_rank(named_parts[0][1], 1, tp_rank, tp)]]
    ordered = sorted(named_parts, key=lambda part: _FUSED_ORDER.get(part[0].split(".")[-2], 0))
    tensors = [tensor for _, tensor in ordered]
    if ".gate_up_proj." in parameter_name:
        return [[slice_for_rank(tensor, 0, tp_rank, tp) for tensor in tensors]]
    if ".qkv_proj." in parameter_name:
        query, *key_value = tensors
        # With fewer KV heads than ranks, `copies` neighbors hold the same head.
        return [
            [
                slice_for_rank(query, 0, tp_rank, tp),
                *(
                    slice_for_rank(tensor, 0, tp_rank // copies, tp // copies)
                    for tensor in key_value
                ),
            ]
            for copies in range(1, tp + 1)
            if tp % copies == 0 and key_value[0].shape[0] % (tp // copies) == 0
        ]
    return [tensors]


def slice_for_rank(tensor: torch.Tensor, dim: int, rank: int, ranks: int) -> torch.Tensor:
    length = tensor.shape[dim] // ranks
    return tensor.narrow(dim, rank * length, length)


def _hash_pieces(pieces: Sequence[torch.Tensor], replica_device: str) -> str:
    flats = [piece.contiguous().reshape(-1).view(torch.uint8) for piece in pieces]
    if replica_device != "cpu":
        return f"{compute_sglang_gpu_hash(torch.cat(flats)):016x}"
    digest = hashlib.sha256()
    for flat in flats:
        digest.update(flat.cpu().numpy().data)
    return digest.hexdigest()[:16]


def compute_sglang_gpu_hash(bytes_tensor: torch.Tensor) -> int:
    """SGLang's hash of a tensor on a GPU, of `bytes_tensor`, uint8, on whatever device it is."""
    whole = SglangGpuHash(bytes_tensor.numel())
    whole.update(bytes_tensor)
    return whole.finish()


class SglangGpuHash:
    """SGLang's hash of a tensor on a GPU whose bytes come piece by piece.

    Two 32-bit sums per tile of 8192 little-endian words, each word mixed with its position;
    tiles are finished, joined to 64 bits and added up.

    Args:
        size_bytes: Of all pieces.
    """

    def __init__(self, size_bytes: int) -> None:
        self._all_words = -(-size_bytes // 4)
        self._words = 0
        self._total = 0
        self._rest: torch.Tensor | None = None
        """The begin of a tile."""

    def update(self, bytes_tensor: torch.Tensor) -> None:
        """Take the next bytes in, a vector of uint8."""
        if self._rest is not None:
            bytes_tensor = torch.cat([self._rest, bytes_tensor])
        whole = bytes_tensor.numel() // _TILE_BYTES * _TILE_BYTES
        self._add_words(bytes_tensor[:whole])
        self._rest = bytes_tensor[whole:].clone() if whole < bytes_tensor.numel() else None

    def finish(self) -> int:
        if self._rest is not None:
            self._add_words(torch.nn.functional.pad(self._rest, (0, -self._rest.numel() % 4)))
        return _finish_hash(self._total)

    def _add_words(self, bytes_tensor: torch.Tensor) -> None:
        words = bytes_tensor.view(torch.int32)
        if not words.numel():
            return
        if words.is_cuda and find_spec("triton") is not None:
            from areal_hpc.weights.gpu_hash_kernel import sum_tile_hashes

            high, low = sum_tile_hashes(
                words, self._words, self._all_words, _TILE_WORDS, _HASH_HALF_CONSTANTS
            )
            self._total += (high << 32) + low
        else:
            chunk = _TILE_WORDS * 512  # bounds the 64-bit temporaries
            for start in range(0, words.numel(), chunk):
                part = words[start : start + chunk]
                self._total += _sum_tile_hashes(part, self._words + start, self._all_words)
        self._words += words.numel()


def _finish_hash(total: int) -> int:
    if not total:
        return 0  # of no bytes
    mask = (1 << 64) - 1  # what follows is splitmix64's finalizer
    total &= mask
    total = ((total ^ (total >> 30)) * 0xBF58476D1CE4E5B9) & mask
    total = ((total ^ (total >> 27)) * 0x94D049BB133111EB) & mask
    return total ^ (total >> 31)


def _sum_tile_hashes(words: torch.Tensor, start: int, all_words: int) -> int:
    value = words.to(torch.int64) & _WORD_MASK
    position = torch.arange(start, start + words.numel(), device=words.device) & _WORD_MASK
    halves = []
    for seed, factor, turn in _HASH_HALF_CONSTANTS:
        rotated = ((position << turn) | (position >> (32 - turn))) & _WORD_MASK
        mixed = _fmix32(value ^ ((position * factor + seed) & _WORD_MASK) ^ rotated)
        mixed = torch.nn.functional.pad(mixed, (0, -words.numel() % _TILE_WORDS))
        sums = mixed.view(-1, _TILE_WORDS).sum(1) & _WORD_MASK
        halves.append(_fmix32(sums ^ (all_words * 4 & _WORD_MASK)))
    # Summed as two halves: a 64-bit signed sum would overflow into the wrong sign.
    high, low = (int(half.sum().item()) for half in halves)
    return (high << 32) + low


def _fmix32(word: torch.Tensor) -> torch.Tensor:
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD_MASK
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD_MASK
    return word ^ (word >> 16)

"""A pack as segments of queries, each with the keys it may see.

A segment is a run of consecutive queries of one sequence; its keys are that sequence from its
first token to the segment's last one, so the mask is causal, aligned at the end, and never has to
be written down. Without context parallelism a segment is a sequence. With it each sequence gives a
rank two segments, its zig-zag chunks, whose keys are picked from those gathered from all ranks.

Memory is linear in the tokens, work in the sum of (queries x keys) of the segments.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention.bias import causal_lower_right

from areal_hpc.trainer.batch.packing import IntArray, locate_sequence_after_cp_gather
from areal_hpc.trainer.private_apis.torch_private import run_flash_attention


@dataclass(slots=True, eq=False)
class VarlenAttention:
    """S: segments, in the order of their queries. Starts have S + 1 entries, int32."""

    query_lengths: list[int]
    key_lengths: list[int]
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    key_places: torch.Tensor | None
    """Where each segment's keys lie among the gathered ones; None takes them as they are."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Queries [t, heads, d] over gathered keys and values [k, kv_heads, d]: [t, heads, d]."""
        if self.key_places is not None:
            key, value = (
                key.index_select(0, self.key_places),
                value.index_select(0, self.key_places),
            )
        run = self.attend_fused if can_use_flash(query) else self.attend_per_segment
        return run(query, key, value, scale)

    def attend_fused(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """All segments in one call of PyTorch's own build of FlashAttention-2.

        Its causal mask is aligned at the end, as segments need it.
        """
        return run_flash_attention(
            query, key, value, self.query_starts, self.key_starts,
            max(self.query_lengths), max(self.key_lengths), scale,
        )  # fmt: skip

    def attend_per_segment(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One call per segment: on a CPU, and in float32, which FlashAttention lacks."""
        is_grouped = query.shape[1] != key.shape[1]
        if is_grouped and query.is_cuda:  # CUDA's memory-saving kernel has no grouped heads
            copies = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
            is_grouped = False
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        attended = []
        for q, k, v in zip(
            query.split(self.query_lengths, 2),
            key.split(self.key_lengths, 2),
            value.split(self.key_lengths, 2),
            strict=True,
        ):
            is_square = q.shape[2] == k.shape[2]
            mask = None if is_square else causal_lower_right(q.shape[2], k.shape[2])
            attended.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=is_square, scale=scale,
                    enable_gqa=is_grouped,
                )
            )  # fmt: skip
        whole = attended[0] if len(attended) == 1 else torch.cat(attended, 2)
        return whole[0].transpose(0, 1)


def can_use_flash(query: torch.Tensor) -> bool:
    head_dim = query.shape[-1]
    return query.is_cuda and query.dtype != torch.float32 and head_dim % 8 == 0 and head_dim <= 256


def plan_varlen_attention(
    lengths: IntArray, *, cp: int, cp_rank: int, device: torch.device
) -> VarlenAttention:
    """The segments of one context-parallel rank, for sequences of these padded lengths."""
    if cp == 1:
        queries, keys, key_places = lengths, lengths, None
    else:
        chunks = lengths // (2 * cp)
        queries = np.repeat(chunks, 2)
        ends = np.array([cp_rank + 1, 2 * cp - cp_rank])
        keys = (chunks[:, None] * ends).ravel()
        places = [
            locate_sequence_after_cp_gather(index, lengths, cp) for index in range(len(lengths))
        ]
        seen = [places[segment // 2][: keys[segment]] for segment in range(len(keys))]
        key_places = torch.from_numpy(np.concatenate(seen)).to(device)
    return VarlenAttention(
        query_lengths=queries.tolist(),
        key_lengths=keys.tolist(),
        query_starts=_compute_starts(queries, device),
        key_starts=_compute_starts(keys, device),
        key_places=key_places,
    )


def _compute_starts(lengths: IntArray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([[0], lengths.cumsum()]).astype(np.int32)).to(device)

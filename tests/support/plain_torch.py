"""Plain references for kernels: attention written out, and gradients of any two computations."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_hpc.trainer.batch.packing import get_zigzag_positions


def attend_plainly(
    parts: Sequence[torch.Tensor], lengths: np.ndarray, scale: float, window: int | None = None
) -> torch.Tensor:
    """Softmax over every earlier token of the same sequence; of queries, keys and values.

    Over the last `window` of them, if that is given.
    """
    query, *shared = parts
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in shared)
    sequence = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).to(query.device)
    position = torch.arange(len(sequence), device=query.device)
    sees = (sequence[:, None] == sequence) & (position[:, None] >= position)
    if window is not None:
        sees &= position[:, None] - position < window
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), value)


def attend_over_ranks(
    plan: Callable[..., Any],
    parts: Sequence[torch.Tensor],
    lengths: np.ndarray,
    scale: float,
    cp: int,
    window: int | None = None,
) -> torch.Tensor:
    """Compute the parts of all context-parallel ranks, and restore the order of the pack."""
    query, key, value = parts
    starts = np.cumsum(lengths) - lengths
    spans = [*zip(starts, map(int, lengths), strict=True)]
    positions = [
        [start + get_zigzag_positions(length, cp, rank) for start, length in spans]
        for rank in range(cp)
    ]
    held = [torch.from_numpy(np.concatenate(parts)).to(query.device) for parts in positions]
    gathered = torch.cat(held)
    attended = [
        plan(lengths, cp=cp, cp_rank=rank, device=query.device).attend(
            query[held[rank]], key[gathered], value[gathered], scale, window
        )
        for rank in range(cp)
    ]
    return torch.cat(attended)[gathered.argsort()]


def check_gradients(
    actual: torch.Tensor, expected: torch.Tensor, inputs: Sequence[torch.Tensor]
) -> None:
    """Check that both have the same values, and the same gradients by the inputs."""
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    want = torch.autograd.grad((expected * weights).sum(), inputs)
    got = torch.autograd.grad((actual * weights).sum(), inputs)
    for gradient, other in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, other)


READS = ("local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")
"""Beginnings of operations whose result, or its size, the host must know."""
INDEXING = ("index", "index_put", "index_put_impl")
"""Operations that turn a mask, where they are given one, into indices: `nonzero`."""


class OperationLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__.strip("_")
        if name in INDEXING:
            kinds = [str(index.dtype) for index in args[1] if index is not None]
            if "torch.bool" in kinds or "torch.uint8" in kinds:
                name = "nonzero"
        self.names.append(name)
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> list[str]:
        """Operations for which the host would wait for a device."""
        return [name for name in self.names if name.startswith(READS)]

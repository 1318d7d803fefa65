"""How ranks agree: small collectives over the whole world, on CPU tensors."""

from __future__ import annotations

import torch
import torch.distributed as dist


def any_rank(flag: bool) -> bool:
    """True on every rank when it is true on one. A collective."""
    if dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


def from_rank_zero(message: bytes | None) -> bytes:
    """Rank 0's message, on every rank; the others pass None. A collective."""
    if dist.get_world_size() == 1:
        assert message is not None
        return message
    size = torch.tensor(len(message or b""))
    dist.broadcast(size, src=0)
    body = torch.empty(int(size), dtype=torch.uint8)
    if message is not None:
        body.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(body, src=0)
    return body.numpy().tobytes()

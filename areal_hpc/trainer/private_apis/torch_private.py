"""Private APIs of torch that the trainer uses.

tests/contract/test_private_apis.py checks that each exists with the expected signature.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


def get_default_store() -> dist.Store:  # type: ignore[name-defined]
    return _get_default_store()


def pin_host_memory(host: torch.Tensor) -> None:
    """Lock a host tensor into memory, so that a GPU copies to and from it at full speed.

    Registered, not allocated as pinned: PyTorch's allocator of pinned memory rounds sizes up to a
    power of two, up to twice the request, and shares no memory with other processes.
    """
    size = host.numel() * host.element_size()
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cuda.cudaHostRegister(host.data_ptr(), size, 0)))


def unpin_host_memory(host: torch.Tensor) -> None:
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cuda.cudaHostUnregister(host.data_ptr())))


def record_gpu_memory_history(what: Literal["all"] | None) -> None:
    """Record each allocation with its stack from now on; None ends it."""
    torch.cuda.memory._record_memory_history(what)


def dump_gpu_memory_snapshot(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def activate_flash_attention_4(device: torch.device) -> bool:
    """Activate FlashAttention-4 behind PyTorch's operator, if GPU and environment have it.

    It supports compute capability 9.0 and 10.0. PyTorch 2.13 unpacks fewer values than the
    package's current releases return; 2.14, which the GPU environment has, handles them.
    """
    if torch.cuda.get_device_capability(device) not in ((9, 0), (10, 0)):
        return False
    try:
        torch.nn.attention.activate_flash_attention_impl("FA4")
    except ImportError:  # flash-attn-4 is not installed
        return False
    return True


def run_flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query_length: int,
    max_key_length: int,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attend causally with PyTorch's FlashAttention-2, or 4 if it is active: [t, heads, d].

    Starts are the first token of each segment and the end of the last one [S + 1], int32; lengths
    are those of the longest segment. Queries, keys and values have 16 bits and are on a GPU.
    """
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, query_starts, key_starts,
        max_query_length, max_key_length, 0.0, True, False, scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return attended

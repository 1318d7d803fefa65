"""Private APIs of torch that the trainer uses.

tests/contract/test_private_apis.py checks that each is there with the signature relied on.
"""

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


def get_default_store() -> dist.Store:  # type: ignore[name-defined]
    return _get_default_store()


def pin_host_memory(host: torch.Tensor) -> None:
    """Lock a tensor of the host into memory, so that a GPU copies to and from it at full speed.

    Registered instead of allocated as pinned: PyTorch's allocator of pinned memory rounds up to a
    power of two, up to twice of what is asked for, and shares with no other process.
    """
    size = host.numel() * host.element_size()
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cuda.cudaHostRegister(host.data_ptr(), size, 0)))


def unpin_host_memory(host: torch.Tensor) -> None:
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(cuda.cudaHostUnregister(host.data_ptr())))


def activate_flash_attention_4(device: torch.device) -> bool:
    """Put FlashAttention-4's kernels behind PyTorch's operator, where GPU and environment have it.

    They are for compute capability 9.0 and 10.0. PyTorch 2.13 unpacks less than the package's
    releases of today return; 2.14, which GPUs have, takes what it knows.
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
    """Causal attention by PyTorch's FlashAttention-2, or by 4 if that is active: [t, heads, d].

    Starts are where each segment begins and where the last one ends [S + 1], int32; the lengths are
    those of the longest segment. Queries, keys and values have 16 bits and are on a GPU.
    """
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, query_starts, key_starts,
        max_query_length, max_key_length, 0.0, True, False, scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return attended

"""Activations in host memory between the forward and the backward pass."""

from collections.abc import Iterable

import torch

MIN_OFFLOADED_BYTES = 64 << 10
"""Smaller tensors stay: a copy of one costs as much time as one of this size."""

_HostCopy = tuple[torch.device, torch.Tensor]


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context whose forward passes leave what backward passes need in pinned host memory.

    Copies run on the stream that computes, in its order: nothing has to wait for them but what
    comes after. Parameters are saved by nearly every operation and stay where they are.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(self._pack, self._unpack)
        self._parameter_storages = {one.untyped_storage().data_ptr() for one in parameters}
        self.offloaded_bytes = 0
        """Bytes copied to the host so far."""

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _HostCopy:
        size = tensor.numel() * tensor.element_size()
        is_parameter = tensor.untyped_storage().data_ptr() in self._parameter_storages
        if is_parameter or size < MIN_OFFLOADED_BYTES:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        host.copy_(tensor, non_blocking=tensor.is_cuda)
        self.offloaded_bytes += size
        return tensor.device, host

    @staticmethod
    def _unpack(packed: torch.Tensor | _HostCopy) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=device.type == "cuda")

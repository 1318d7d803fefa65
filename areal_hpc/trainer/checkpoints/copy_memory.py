"""Host memory that holds a rank's part of a checkpoint, shared with the process that writes it."""

import mmap
import os

import torch

from areal_hpc.trainer.private_apis.torch_private import pin_host_memory, unpin_host_memory


class SharedCopyBuffer:
    """Anonymous memory: a kill leaves nothing of it behind.

    It is as large as the largest copy so far, from the first checkpoint to the end of the run.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        """By which the writer process shares it."""
        self._memory: torch.Tensor | None = None
        self._is_pinned = False

    def reuse_or_grow(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """The memory as bytes, pinned if what is copied to it comes from a GPU."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._unpin_and_forget()
            size_bytes = max(size_bytes, mmap.PAGESIZE)
            # All pages at once: else each costs a trap, in the first checkpoint's copy.
            os.posix_fallocate(self.descriptor, 0, size_bytes)
            mapped = mmap.mmap(self.descriptor, size_bytes)
            self._memory = torch.frombuffer(mapped, dtype=torch.uint8)
            if device.type == "cuda":
                pin_host_memory(self._memory)
                self._is_pinned = True
        return self._memory

    def _unpin_and_forget(self) -> None:
        if self._memory is not None and self._is_pinned:
            unpin_host_memory(self._memory)
        self._memory, self._is_pinned = None, False

    def close(self) -> None:
        self._unpin_and_forget()
        os.close(self.descriptor)

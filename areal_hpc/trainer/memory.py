"""Memory that a trainer rank has held."""

import resource

import torch


def read_peak_memory_bytes(device: torch.device) -> int:
    """The most that this process has held so far: of its GPU, or resident without one."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB

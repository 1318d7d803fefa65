"""Memory of a trainer rank: its peak, advice when it is exhausted, and offload of activations."""

import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import TrainerConfig
from areal_hpc.trainer.model.families.architecture import Architecture
from areal_hpc.trainer.model.memory_estimate import (
    GIB,
    RESERVE_BYTES,
    TrainerMemory,
    describe_cheapest_fitting_change,
    estimate_stage_memory,
)
from areal_hpc.trainer.model.policy import TrainedNetwork

OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of CUDA and NCCL, CPU allocator and cuBLAS; not all raise `torch.OutOfMemoryError`."""
OPTIMIZER_STEP_DESCRIPTION = "the optimizer's step"
MIN_SAVED_MEMORY_SHARE = 0.1
"""Smallest saving, as a share of the (too low) estimate, for which a change is suggested."""
MAX_QUOTED_CHARACTERS = 300
"""Characters kept of the allocator's message; PyTorch's continues with general advice."""


def read_peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, in a GPU's memory or the host's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in OUT_OF_MEMORY_TEXTS
    )


@contextmanager
def note_work_on_memory_error(describe_work: Callable[[], str]) -> Iterator[None]:
    """Add a note of the current work to a memory error; `raise_out_of_memory_as_...` reads it."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            error.add_note(describe_work())
        raise


@contextmanager
def raise_out_of_memory_as_recipe_error(
    policy: TrainedNetwork, config: TrainerConfig, critic: Architecture | None = None
) -> Iterator[None]:
    """Convert a memory error into a RecipeError with the work, the estimate and a key to change."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        stage = parallel_state.get_pipeline_model_parallel_rank()
        estimate = estimate_stage_memory(policy.arch, config, stage, critic=critic)
        parts = ("parameters", "gradients", "optimizer", "activations", "logits")
        estimated = ", ".join(f"{name} {getattr(estimate, name) / GIB:.1f}" for name in parts)
        work = ", ".join(getattr(error, "__notes__", [])) or "a training step"
        raise RecipeError(
            f"memory ran out in {work}. This rank has held {_describe_memory_use(policy.device)}; "
            f"estimated are {estimate.total / GIB:.1f} GiB ({estimated}) with micro-batches of "
            f"{config.max_tokens_per_microbatch} tokens. "
            f"{str(error)[:MAX_QUOTED_CHARACTERS]}",
            key="trainer.max_tokens_per_microbatch",
            hint=_suggest_memory_saving_change(policy.arch, config, estimate, work, critic),
        ) from error


def _describe_memory_use(device: torch.device) -> str:
    peak = f"{read_peak_memory_bytes(device) / GIB:.1f} GiB at most"
    if device.type != "cuda":
        return peak
    free, whole = torch.cuda.mem_get_info(device)
    return f"{peak} of its GPU's {whole / GIB:.1f}, of which {free / GIB:.1f} are free now"


def _suggest_memory_saving_change(
    arch: Architecture,
    config: TrainerConfig,
    estimate: TrainerMemory,
    failed_work: str,
    critic: Architecture | None,
) -> str:
    fallback = "lower trainer.max_tokens_per_microbatch"
    if failed_work == OPTIMIZER_STEP_DESCRIPTION:
        if arch.transformers_config:
            is_divided = config.parallel.shard_parameters or arch.lora is not None
            sharding = "" if is_divided else "trainer.parallel.shard_parameters=true, or "
            return f"{sharding}raise trainer.parallel.dp"
        if not config.offload.optimizer:
            return "trainer.offload.optimizer=true, or raise trainer.parallel.dp"
        return "raise trainer.parallel.tp, pp or dp"
    saved = MIN_SAVED_MEMORY_SHARE * (estimate.total - RESERVE_BYTES)
    change = describe_cheapest_fitting_change(
        arch, config, int(estimate.total - saved), critic=critic
    )
    return f"{change}, estimated; or {fallback}" if change else f"{fallback}, or use more ranks"


MIN_OFFLOADED_BYTES = 64 << 10
"""Size of the smallest offloaded tensor: copying a smaller one takes as long."""

_HostCopy = tuple[torch.device, torch.Tensor]


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Context in which forward passes move the tensors that backward needs to pinned host memory.

    Copies run in order on the stream that computes: only later work waits for them. Parameters
    are saved by nearly every operation and stay in place.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(self._pack, self._unpack)
        self._parameter_storages = {weight.untyped_storage().data_ptr() for weight in parameters}
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

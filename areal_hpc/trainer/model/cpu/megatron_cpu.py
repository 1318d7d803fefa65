"""Megatron-core without a GPU. Import this before any module of megatron.

Megatron-core calls `torch.cuda` for its current device, random state and synchronization, and
writes `device="cuda"` in a few literals (megatron/core/pipeline_parallel/schedules.py,
optimizer/clip_grads.py). On a machine without a GPU this module replaces these few names; with a
GPU it changes none of them.
"""

import functools
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

if not torch.cuda.is_available():
    # Megatron compiles functions at import. Without the compiler they stay uncompiled, and each
    # process saves its import, 1.7 s of a core.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Megatron reports at length, by logs and by warnings, that Transformer Engine and Apex are absent,
# which is intended. One of its modules resets filters, so the warnings are recorded.
logging.getLogger("megatron").setLevel(logging.WARNING)
with warnings.catch_warnings(record=True):
    warnings.simplefilter("always")  # recorded, even if warnings are errors
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel  # noqa: F401
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher


def patch_torch_megatron_without_gpu() -> None:
    """Replace the CUDA names by CPU versions, unless there is a GPU. Safe to repeat."""
    # torch 2.13 renames collectives that megatron-core 0.16 still calls by the old name.
    warnings.filterwarnings("ignore", message=r".*(reduce_scatter_tensor|_all_gather_base)")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\.")
    # Megatron's default of an option that is not used here.
    warnings.filterwarnings("ignore", message="full scope is deprecated")
    # Megatron 0.16 reads this name without having bound it when Transformer Engine is absent.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    current_device: Any = torch.cuda.current_device
    if torch.cuda.is_available() or current_device is _get_cpu_device:
        return
    # At the first use of a default device torch lists the factories that respect it, not wrapped
    # ones; else `from_pretrained` would treat a network as initialized that it only allocates.
    with torch.device("cpu"):
        torch.empty(0)
    # "CPU RNG state changed within GPU RNG context": here they are the same state.
    logging.getLogger(parallel_random.__name__).setLevel(logging.ERROR)
    get_state, set_state = torch.get_rng_state, torch.set_rng_state
    stand_ins: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (torch.cuda, "current_device", _get_cpu_device),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "get_rng_state", lambda *_, **__: get_state()),
        (torch.cuda, "set_rng_state", lambda state, *_, **__: set_state(state)),
        (parallel_random, "_get_cuda_rng_state", lambda *_, **__: get_state()),
        (parallel_random, "_set_cuda_rng_state", lambda state, *_, **__: set_state(state)),
        # The dispatcher of a mixture of experts copies sizes to the host on a separate stream.
        (torch.cuda, "Stream", _CpuStream),
        (torch.cuda, "current_stream", torch.cpu.current_stream),
        (torch.cuda, "stream", torch.cpu.stream),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _convert_to_numpy),
        (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
        (torch.Tensor, "type", _wrap_type_as_cuda(torch.Tensor.type)),
        *(
            (torch, name, _wrap_factory_for_cpu(getattr(torch, name)))
            for name in ("tensor", "zeros", "empty")
        ),
    )
    for owner, name, value in stand_ins:
        setattr(owner, name, value)


def _get_cpu_device() -> torch.device:
    return torch.device("cpu")


class _CpuStream(torch.cpu.Stream):
    def record_event(self, _: Any = None) -> Any:
        return torch.cpu.Event()


def _convert_to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert sizes, as collectives need: Megatron converts them only when they are on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _wrap_type_as_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(tensor, *args, **kwargs)
        return original(tensor).replace("torch.", "torch.cuda.")

    return type_


def _wrap_factory_for_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create

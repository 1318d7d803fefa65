"""Parameters divided over all ranks by PyTorch's FSDP2, for networks of transformers' modules.

A rank keeps some rows of each parameter in float32, and their moments. A layer's parameters are
gathered in the dtype of the passes before they are needed and dropped afterwards; gradients are
summed in float32, each row's on the rank that keeps it.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard_decoder(decoder: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Divide a `ScoredTokenDecoder` over all ranks. A collective.

    Parameters on the meta device get memory for this rank's rows alone.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, device.type),
        # Inputs are not cast: some families keep rotary angles in float32.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    for module in (*decoder.causal_lm.model.layers, decoder):
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        fully_shard(module, **options)
    if any(parameter.is_meta for parameter in decoder.parameters()):
        _allocate_own_rows(decoder, device)
    for module in decoder.modules():
        if isinstance(module, FSDPModule):  # gradients are sums, as in Megatron's wrapper
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    decoder.config.finalize_model_grads_func = _divide_by_scored_tokens


def _allocate_own_rows(decoder: Any, device: torch.device) -> None:
    computed = dict(decoder.named_buffers(remove_duplicate=False))
    decoder.to_empty(device=device)
    for name, buffer in decoder.named_buffers(remove_duplicate=False):
        buffer.copy_(computed[name])  # rotary angles, which no checkpoint has
    decoder.causal_lm.tie_weights()


def _divide_by_scored_tokens(
    chunks: list[Any], num_tokens: torch.Tensor | None = None, **_: Any
) -> None:
    if num_tokens is None:
        return
    dist.all_reduce(
        num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    scale = 1.0 / num_tokens.clamp(min=1)
    for chunk in chunks:
        for gradient in list_gradients(chunk.parameters()):
            gradient.to_local().mul_(scale)


def list_gradients(parameters: Any) -> list[DTensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def copy_own_rows(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill a parameter, or the rows of it that this rank keeps."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    first = find_first_row(target)
    own = target.to_local()
    own.copy_(whole[first : first + len(own)])


def gather_rows(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole parameter on every rank, in `dtype` if it is divided. A collective."""
    if not isinstance(parameter, DTensor):
        return parameter
    divided: Any = parameter.to(dtype)
    whole: torch.Tensor = divided.full_tensor()
    return whole


def find_first_row(parameter: DTensor) -> int:
    """Of those that this rank keeps, as `torch.chunk` cuts rows."""
    mesh = parameter.device_mesh
    rows = -(-len(parameter) // mesh.size())
    return min(rows * mesh.get_local_rank(), len(parameter))

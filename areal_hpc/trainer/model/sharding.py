"""FSDP2 sharding of parameters over all ranks, for networks of transformers' modules.

A rank keeps some rows of each parameter in float32, and their moments. A layer's parameters are
gathered in the dtype of the passes before use and dropped afterwards; gradients are summed in
float32, each row on the rank that keeps it.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard_decoder(decoder: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Divide a `ScoredTokenDecoder` over all ranks, and allocate this rank's rows. A collective.

    Parameters, which may be on the meta device, are uninitialized afterwards.
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
    computed = dict(decoder.named_buffers(remove_duplicate=False))
    decoder.to_empty(device=device)
    for name, buffer in decoder.named_buffers(remove_duplicate=False):
        buffer.copy_(computed[name])  # rotary angles, which no checkpoint has
    decoder.causal_lm.tie_weights()
    for module in decoder.modules():
        if isinstance(module, FSDPModule):  # gradients are sums, as in Megatron's wrapper
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def copy_own_rows(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Fill a parameter, or only the rows that this rank keeps."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    first = find_first_row(target)
    own = target.to_local()
    own.copy_(whole[first : first + len(own)])


def gather_rows(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole parameter on every rank, in `dtype` if it is divided. A collective."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to(dtype).full_tensor()  # type: ignore[no-any-return, attr-defined]


def find_first_row(parameter: DTensor) -> int:
    """Return the first row that this rank keeps, as `torch.chunk` divides rows."""
    mesh = parameter.device_mesh
    rows = -(-len(parameter) // mesh.size())
    return min(rows * mesh.get_local_rank(), len(parameter))

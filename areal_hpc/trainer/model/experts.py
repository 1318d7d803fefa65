"""Experts of a mixture, all of a rank in two grouped matrix products a layer.

Megatron-core has grouped experts of Transformer Engine and of a CUDA extension; its own local ones
are a loop, several kernels an expert. Here the weights of all experts are stacked, and PyTorch's
grouped product, which has an implementation for every device, takes a run of rows for each.

Checkpoints are those of the loop: tensors of the same names and shapes.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule

from areal_hpc.trainer.model.kernels.swiglu import weighted_swiglu


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The `experts` of a mixture's layer: this expert-parallel rank's, each a gated MLP."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.expert_group, self.replica_group = pg_collection.ep, pg_collection.expt_dp
        ffn, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = _StackedLinear(num_local_experts, 2 * ffn, hidden, config)
        self.linear_fc2 = _StackedLinear(num_local_experts, hidden, ffn, config)

    def forward(
        self, rows_RH: torch.Tensor, rows_per_expert_E: torch.Tensor, weights_R: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Rows sorted by expert, with the weight of each, to the weighted outputs; no bias.

        The numbers of rows are those of their device: the host need not know them.
        """
        ends_E = rows_per_expert_E.cumsum(0, dtype=torch.int32)
        product_RF = weighted_swiglu(self.linear_fc1(rows_RH, ends_E), weights_R)
        return self.linear_fc2(product_RF, ends_E), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """This rank's run of the axis that counts experts, as Megatron's checkpoint wants it."""
        axes = len(sharded_offsets)
        run = (axes, self.expert_group.rank(), self.expert_group.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}",
                parameter,
                *sharded_offsets,
                run,
                replica_id=(0, 0, self.replica_group.rank()),
                prepend_axis_num=axes,
            )
            for name, parameter in self.named_parameters()
        }


class _StackedLinear(torch.nn.Module):
    def __init__(self, experts: int, outputs: int, inputs: int, config: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        shape = (experts, outputs, inputs)
        weight = torch.empty(shape, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        # Of what every tensor-parallel rank holds Megatron counts the gradient once. An expert's is
        # cut over the ranks that hold it, by the optimizer: each rank's part counts in the norm.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, rows_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Rows [R, inputs], those of expert e before `ends_E[e]`, to [R, outputs]."""
        return F.grouped_mm(rows_RI, self.weight.transpose(1, 2), offs=ends_E)

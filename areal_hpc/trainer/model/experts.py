"""Mixtures of experts: the order of tokens, their exchange over ranks, and the experts themselves.

Rows are sorted by expert, then by token. The exchange in both directions, and its gradients, are
gathers, and sums over the experts of a token. Megatron's own adds rows up by atomic operations,
whose order on a GPU, and so the last bits of the result, differ from run to run.

Megatron-core has grouped experts of Transformer Engine and of a CUDA extension; its own local
experts are a loop with several kernels per expert. This module stacks the weights of all experts of
a rank, and PyTorch's grouped product, which exists for every device, multiplies a run of rows with
each. Checkpoints equal those of the loop: tensors of the same names and shapes.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.autograd.function import once_differentiable

from areal_hpc.trainer.model.elementwise import weighted_swiglu
from areal_hpc.trainer.private_apis.megatron_private import begin_copy_of_split_sizes

BLACKWELL = 10
"""Compute capability of the first GPUs of that generation."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertOrder:
    """Order of rows. T: tokens, K: experts that each token visits, R = T K: rows, one per visit."""

    visits_R: torch.Tensor
    """Visit of each row: token * K + number of the expert among the token's."""
    rows_TK: torch.Tensor
    """Row of each visit."""
    experts_TK: torch.Tensor
    """Experts of each token, ascending."""

    def spread(self, tokens_TH: torch.Tensor) -> torch.Tensor:
        """Copy each token's states once for each of its experts [R, H]."""
        return _MovedStates.apply(tokens_TH, self.visits_R, self.rows_TK, False)  # type: ignore[no-any-return, no-untyped-call]

    def sum_rows_per_token(self, rows_RH: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's rows [T, H]."""
        return _MovedStates.apply(rows_RH, self.visits_R, self.rows_TK, True)  # type: ignore[no-any-return, no-untyped-call]

    def pick_weights(self, weights_TE: torch.Tensor) -> torch.Tensor:
        """Return the weight of each row, from the weights of all experts for each token [R]."""
        return weights_TE.gather(1, self.experts_TK).flatten()[self.visits_R]


def plan_expert_order(is_visited_TE: torch.Tensor, per_token: int) -> ExpertOrder:
    """Plan the order for a routing in which every token visits `per_token` experts.

    It reads nothing from the device. Both sorts are stable: equal keys keep their order everywhere.
    """
    by_visit_TE = is_visited_TE.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    experts_TK = by_visit_TE[:, :per_token].contiguous()
    visits_R = experts_TK.flatten().argsort(stable=True)
    numbers_R = torch.arange(len(visits_R), device=visits_R.device)
    rows_R = torch.empty_like(visits_R).scatter_(0, visits_R, numbers_R)
    return ExpertOrder(visits_R, rows_R.view_as(experts_TK), experts_TK)


class _MovedStates(torch.autograd.Function):
    """States of tokens copied to their rows, or `sums` of rows: each is the other's gradient."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, visits_R: torch.Tensor, rows_TK: torch.Tensor, sums: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(visits_R, rows_TK)
        ctx.sums = sums
        return _move_states(states, visits_R, rows_TK, sums)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        visits_R, rows_TK = ctx.saved_tensors
        return _move_states(gradient, visits_R, rows_TK, not ctx.sums), None, None, None


def _move_states(
    states: torch.Tensor, visits_R: torch.Tensor, rows_TK: torch.Tensor, sums: bool
) -> torch.Tensor:
    if not sums:
        return states.index_select(0, visits_R // rows_TK.shape[1])
    visits_RH = states.index_select(0, rows_TK.flatten())
    return visits_RH.view(*rows_TK.shape, states.shape[1]).sum(1)


class StableTokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatcher that moves tokens to their experts and back, in the same order in every run.

    It overrides the steps of megatron/core/transformer/moe/token_dispatcher.py before and after the
    exchange over ranks. The numbers of rows stay on the device. A rank that holds all experts sends
    no rows, so the host needs no numbers.
    """

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows sorted by expert, and the weight of each."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        if self.ep_size == 1:
            self.tokens_per_expert = routing_map.sum(0)
        else:
            self.tokens_per_expert = self.preprocess(routing_map)
            begin_copy_of_split_sizes(self)
        self.order = plan_expert_order(routing_map, self.config.moe_router_topk)
        tokens_TH = hidden_states.view(-1, self.hidden_shape[-1])
        return self.order.spread(tokens_TH), self.order.pick_weights(probs)

    def token_dispatch(
        self, rows_RH: torch.Tensor, weights_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows to the ranks that hold their experts."""
        if self.ep_size == 1:
            return rows_RH, weights_R
        return super().token_dispatch(rows_RH, weights_R)  # type: ignore[no-any-return]

    def dispatch_postprocess(
        self, rows_RH: torch.Tensor, weights_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all ranks' rows sorted by expert, their number per expert, and their weights."""
        if self.ep_size == 1:
            return rows_RH, self.tokens_per_expert, weights_R
        return super().dispatch_postprocess(rows_RH, weights_R)  # type: ignore[no-any-return]

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the rows in the order in which they came from other ranks."""
        if self.ep_size == 1:
            return hidden_states
        return super().combine_preprocess(hidden_states)  # type: ignore[no-any-return]

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        return self.order.sum_rows_per_token(permutated_local_input_tokens).view(self.hidden_shape)


def use_stable_dispatch(gpt: Any) -> None:
    """Replace the dispatcher of every mixture layer: Megatron has no option for its class."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for mlp in (layer.mlp for layer in gpt.decoder.layers):
        if isinstance(mlp, MoELayer):
            mlp.token_dispatcher = StableTokenDispatcher(
                mlp.num_local_experts, mlp.local_expert_indices, mlp.config, groups
            )


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """`experts` of a mixture layer: those of this expert-parallel rank, each a gated MLP."""

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__(config=config)
        self.expert_group, self.replica_group = pg_collection.ep, pg_collection.expt_dp
        ffn, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.linear_fc1 = _StackedLinear(num_local_experts, 2 * ffn, hidden, config)
        self.linear_fc2 = _StackedLinear(num_local_experts, hidden, ffn, config)

    def forward(
        self, rows_RH: torch.Tensor, rows_per_expert_E: torch.Tensor, weights_R: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Map rows sorted by expert, and their weights, to the weighted outputs; no bias.

        The numbers of rows are on the rows' device: the host does not need them.
        """
        ends_E = rows_per_expert_E.cumsum(0, dtype=torch.int32)
        product_RF = weighted_swiglu(self.linear_fc1(rows_RH, ends_E), weights_R)
        return self.linear_fc2(product_RF, ends_E), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return this rank's run of the expert axis, in the form of Megatron's checkpoints."""
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
        # Megatron counts the gradient of a parameter that all tensor-parallel ranks hold once. The
        # optimizer divides an expert's gradient over these ranks, and each part counts in the norm.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)

    def forward(self, rows_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Map rows [R, inputs], those of expert e before `ends_E[e]`, to [R, outputs]."""
        weight = self.weight
        if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] >= BLACKWELL:
            weight = ClearedGradients.apply(weight, ends_E)  # type: ignore[no-untyped-call]
        return F.grouped_mm(rows_RI, weight.transpose(1, 2), offs=ends_E)


class ClearedGradients(torch.autograd.Function):
    """Identity of stacked weights that sets the gradient of an expert without rows to 0.

    On Blackwell `grouped_mm` leaves this gradient uninitialized (pytorch/pytorch#172439).
    """

    @staticmethod
    def forward(ctx: Any, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ends_E)
        return weight_EOI.view_as(weight_EOI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_EOI: torch.Tensor) -> tuple[torch.Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        is_empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        return gradient_EOI.masked_fill(is_empty_E[:, None, None], 0.0), None

"""Way of a mixture's tokens to the experts they visit and back, the same at every run."""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from areal_hpc.trainer.model.kernels.expert_order import plan_expert_order
from areal_hpc.trainer.private_apis.megatron_private import begin_copy_of_split_sizes


class StableTokenDispatcher(MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Brings tokens to the experts they visit and back, in an order that no run changes.

    Overrides what megatron/core/transformer/moe/token_dispatcher.py does before the exchange over
    ranks and after it. The numbers of rows stay on the device. A rank that holds all experts sends
    no rows, so nothing of its layers must be known to the host.
    """

    @property
    def holds_all_experts(self) -> bool:
        return bool(self.ep_size == 1)

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows sorted by expert, and the weight of each."""
        self.hidden_shape, self.probs = hidden_states.shape, probs
        if self.holds_all_experts:
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
        if self.holds_all_experts:
            return rows_RH, weights_R
        found: tuple[torch.Tensor, torch.Tensor] = super().token_dispatch(rows_RH, weights_R)
        return found

    def dispatch_postprocess(
        self, rows_RH: torch.Tensor, weights_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows of all ranks sorted by expert, their number for each, and their weights."""
        if self.holds_all_experts:
            return rows_RH, self.tokens_per_expert, weights_R
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = super().dispatch_postprocess(
            rows_RH, weights_R
        )
        return found

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows in the order in which they came from other ranks."""
        if self.holds_all_experts:
            return hidden_states
        sorted_back: torch.Tensor = super().combine_preprocess(hidden_states)
        return sorted_back

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        return self.order.sum_rows_per_token(permutated_local_input_tokens).view(self.hidden_shape)


def use_stable_dispatch(gpt: Any) -> None:
    """Replace the dispatcher of every layer of a mixture: Megatron lets nobody choose its class."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    for layer in gpt.decoder.layers:
        layer.mlp.token_dispatcher = StableTokenDispatcher(
            layer.mlp.num_local_experts, layer.mlp.local_expert_indices, layer.mlp.config, groups
        )

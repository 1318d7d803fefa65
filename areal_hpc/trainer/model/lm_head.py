"""The network's last layer, applied to the tokens that are scored and to no other.

Of an agent's trajectory most tokens are prompts and the results of tools: their logits are wanted
by nobody, and the projection onto the vocabulary is the largest matrix product of a small model.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from areal_hpc.trainer.megatron_private import GPTWithSelectedStates
from areal_hpc.trainer.model.attention_plan import AttentionPlan


class ScoredTokenGPT(GPTWithSelectedStates):
    """Gives the logits [1, N, vocabulary / tp] of the pack's `scored_N` places."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            # Tokens are gathered before they are chosen; the gathering sums the gradients.
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    def select_states(
        self, hidden_states: torch.Tensor, packed_seq_params: AttentionPlan
    ) -> torch.Tensor:
        """The hidden states of the scored tokens, on every tensor-parallel rank [N, 1, hidden]."""
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, group=self.pg_collection.tp
            )
        return hidden_states.index_select(0, packed_seq_params.scored_N)

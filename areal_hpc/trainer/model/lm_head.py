"""The network's last layer, applied to the tokens that are scored and to no other.

Of an agent's trajectory most tokens are prompts and the results of tools: their logits are wanted
by nobody, and the projection onto the vocabulary is the largest matrix product of a small model.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from areal_hpc.trainer.model.attention_plan import PackedAttention


class ScoredGPT(GPTModel):  # type: ignore[misc]
    """Gives the logits [1, N, vocabulary / tp] of the pack's `scored_N` places.

    Overrides one method of megatron-core 0.16 (models/gpt/gpt_model.py), which it calls with
    every argument named.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            # Tokens are gathered before they are chosen; the gathering sums the gradients.
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedAttention, **others: Any
    ) -> torch.Tensor:
        if self.post_process:
            if self.config.sequence_parallel:
                hidden_states = gather_from_sequence_parallel_region(
                    hidden_states, group=self.pg_collection.tp
                )
            hidden_states = hidden_states.index_select(0, packed_seq_params.scored_N)
        logits: torch.Tensor = super()._postprocess(
            hidden_states=hidden_states, packed_seq_params=packed_seq_params, **others
        )
        return logits

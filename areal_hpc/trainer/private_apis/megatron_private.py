"""Private APIs of megatron-core 0.16 that the trainer uses, and fixes of its errors.

No other module uses any, except for the CUDA calls that `model/cpu/megatron_cpu.py` replaces.
tests/contract/test_private_apis.py checks that each exists with the expected signature.
"""

from collections.abc import Callable
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter

ComputeLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Logits [N, V] of states [N, H] and the weights [V, H] of a head."""
ChooseExperts = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]
"""Function of all scores [T, E] and of the router's own choice, scores and ids [T, K]: scores and
ids [T, K] of the experts that tokens visit."""


class ScoredTokenGPT(GPTModel):  # type: ignore[misc]
    """GPT that returns the logits [1, N, vocabulary / tp] only at the pack's `scored_indices_N`.

    Most tokens of an agent's trajectory are prompts and results of tools, whose logits are not
    needed, and the projection onto the vocabulary is the largest matrix product of a small model.
    With `compute_logits` that function computes the logits from states and weights.

    Overrides a method of megatron/core/models/gpt/gpt_model.py, to which Megatron passes every
    argument by keyword.
    """

    def __init__(self, *args: Any, compute_logits: ComputeLogits | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._compute_logits = compute_logits
        if self.post_process and self.config.sequence_parallel:
            # Tokens are gathered before the selection; the gather sums the gradients.
            self.output_layer.sequence_parallel = False
            self.output_layer.disable_grad_reduce = True

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: Any, **others: Any
    ) -> torch.Tensor:
        if self.post_process:
            if self.config.sequence_parallel:
                hidden_states = gather_from_sequence_parallel_region(
                    hidden_states, group=self.pg_collection.tp
                )
            hidden_states = hidden_states.index_select(0, packed_seq_params.scored_indices_N)
            if self._compute_logits is not None:
                weight_VH = self.output_layer.weight
                if self.share_embeddings_and_output_weights:
                    weight_VH = self.shared_embedding_or_output_weight()
                return self._compute_logits(hidden_states[:, 0], weight_VH)[None]
        logits: torch.Tensor = super()._postprocess(
            hidden_states=hidden_states, packed_seq_params=packed_seq_params, **others
        )
        return logits


class ScoredTokenCritic(GPTModel):  # type: ignore[misc]
    """GPT that returns a value [1, N] for each of the pack's `scored_indices_N`, in float32.

    Its head replaces the vocabulary's. It is the same on all tensor-parallel ranks, which all have
    all tokens: neither values nor gradients need a sum over these ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            head = torch.nn.Linear(self.config.hidden_size, 1, bias=False)
            torch.nn.init.zeros_(head.weight)
            self.output_layer = head

    def _postprocess(
        self, hidden_states: torch.Tensor, *, packed_seq_params: Any, **others: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        hidden_N1H = hidden_states.index_select(0, packed_seq_params.scored_indices_N)
        values_N1 = (hidden_N1H.float() @ self.output_layer.weight.float().T)[..., 0]
        return values_N1.transpose(0, 1)


def replace_expert_choice(router: Any, choose: ChooseExperts) -> None:
    """Make a router of a mixture of experts follow `choose`."""

    def get_replay_topk(scores_TE: torch.Tensor, *limits: Any) -> Any:
        *sizes, compute_topk = limits
        return choose(scores_TE, *compute_topk(scores_TE, *sizes))

    router.router_replay = SimpleNamespace(get_replay_topk=get_replay_topk)


def add_expert_biases(gpt: Any) -> None:
    """Give routers the float32 buffer `expert_bias`, which corrects scores for the choice.

    Megatron's own option also counts tokens in every pass, and moves the bias by the counts.
    """
    for router in (module for module in gpt.modules() if isinstance(module, TopKRouter)):
        del router.expert_bias
        bias_E = torch.zeros(len(router.weight), device=router.weight.device)
        router.register_buffer("expert_bias", bias_E)


def begin_copy_of_split_sizes(dispatcher: Any) -> None:
    """Begin to copy the sizes that a mixture's token exchange needs on the host.

    The dispatcher decides when to wait for the copy.
    """
    dispatcher._maybe_dtoh_and_synchronize("before_permutation_1")


def enable_norm_recompute() -> None:
    """Allow recomputation of norms without Transformer Engine. Safe to repeat.

    `CheckpointWithoutOutput` of megatron/core/tensor_parallel/random.py takes its default `False`
    for a recipe of fp8, and then looks up a name of Transformer Engine.
    """
    parallel_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def take_over_master_weights(distributed_optimizer: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Stop Megatron from copying master weights to the model's; return the latter by the former.

    Megatron would round weights that lie on the host there. The caller rounds them from now on.
    """
    distributed_optimizer._copy_main_params_to_model_params = lambda: None
    masters = distributed_optimizer.shard_fp32_from_float16_groups
    return dict(
        zip(chain(*masters), chain(*distributed_optimizer.shard_float16_groups), strict=True)
    )


class OptimizerShard(NamedTuple):
    """Consecutive numbers of a parameter, which this data-parallel rank steps."""

    parameter: torch.Tensor
    start: int
    """Index among the parameter's numbers, row by row."""
    stop: int
    weights: torch.Tensor
    """Flat view of these numbers in the parameter that the passes use, or in FSDP2's master."""
    master: torch.Tensor
    """Float32, flat; these numbers themselves if they are float32 or FSDP2 divides them."""
    moments: dict[str, torch.Tensor]
    """AdamW's moments, also flat, and its count of steps (`step`)."""


def list_optimizer_shards(optimizer: Any) -> list[OptimizerShard]:
    """List the shards that this rank steps, in the order of Megatron's buffers."""
    shards = []
    for part in optimizer.chained_optimizers:
        for parameter in part.model_param_group_index_map:
            owned = part._get_model_param_range_map(parameter)["param"]
            state = part._get_main_param_and_optimizer_states(parameter)
            master = state.pop("param").detach()
            weights = parameter.detach().view(-1)[owned.start : owned.end]
            shards.append(OptimizerShard(parameter, owned.start, owned.end, weights, master, state))
    return shards

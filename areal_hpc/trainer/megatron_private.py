"""Private APIs of megatron-core 0.16, and fixes of what it gets wrong there.

No other module uses one, but for the CUDA calls that `model/cpu/megatron_cpu.py` replaces.
tests/contract/test_private_apis.py checks that each is there with the signature relied on.

Megatron 0.16 loses or spoils parts of AdamW's state on the way through a checkpoint unless
Transformer Engine or Apex is installed. The fixes are here and in `optimizer.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import random as parallel_random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

OPTIMIZER_STATE_NAMES = ("param", "exp_avg", "exp_avg_sq")
"""What the optimizer holds of each parameter, as Megatron names it; all float32."""


class ScoredTokenGPT(GPTModel):  # type: ignore[misc]
    """GPT that gives the logits [1, N, vocabulary / tp] of the pack's `scored_N` places alone.

    Of an agent's trajectory most tokens are prompts and the results of tools: their logits are
    wanted by nobody, and the projection onto the vocabulary is the largest matrix product of a
    small model.

    Overrides a method of megatron/core/models/gpt/gpt_model.py, which Megatron calls with every
    argument named.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.post_process and self.config.sequence_parallel:
            # Tokens are gathered before they are chosen; the gathering sums the gradients.
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
            hidden_states = hidden_states.index_select(0, packed_seq_params.scored_N)
        logits: torch.Tensor = super()._postprocess(
            hidden_states=hidden_states, packed_seq_params=packed_seq_params, **others
        )
        return logits


def begin_copy_of_split_sizes(dispatcher: Any) -> None:
    """Begin to copy to the host what an exchange of a mixture's tokens must know there.

    The dispatcher decides when to wait for it.
    """
    dispatcher._maybe_dtoh_and_synchronize("before_permutation_1")


def enable_norm_recompute() -> None:
    """Let norms be recomputed where Transformer Engine is absent. Safe to repeat.

    `CheckpointWithoutOutput` of megatron/core/tensor_parallel/random.py takes its default `False`
    for a recipe of fp8, and then looks up a name of Transformer Engine.
    """
    parallel_random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def list_master_weights(part: Any) -> list[torch.Tensor]:
    """The float32 copies of 16-bit parameters that a distributed optimizer steps in their place."""
    return [main for group in part.shard_fp32_from_float16_groups for main in group]


def build_sharded_state(gpt: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Weights (`model`) and moments (`optimizer`) in the `fully_reshardable` form. A collective.

    Any other tp, pp, cp and dp can load it.
    """
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        # Moments are gathered on the first data-parallel rank alone. Otherwise every rank would
        # hold those of its whole replica in host memory, a hundred gigabytes for large models.
        "distrib_optim_fully_reshardable_mem_efficient": True,
        # The names of moments must not depend on how many optimizers the layout makes.
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": gpt.sharded_state_dict(metadata=metadata)}
    with _replace_method(optimizer, "get_parameter_state_dp_zero", _build_in_place_gather):
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
    return state


def to_torch_state(sharded_state: Any) -> Any:
    """A sharded state as PyTorch's checkpoint writer takes it."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state, True)
    return mcore_to_pyt_state_dict(by_key)


def load_optimizer_state(optimizer: Any, state: Any) -> None:
    """Give the optimizer the moments, master weights and step counts of a checkpoint."""
    with _replace_method(optimizer, "_set_main_param_and_optimizer_states", _wrap_load_with_step):
        optimizer.load_state_dict(state)
    _unshare_steps(optimizer)


@contextmanager
def _replace_method(optimizer: Any, name: str, wrap: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Each part's method `name` replaced by `wrap(part, method)` for the time of the block."""
    for part in optimizer.chained_optimizers:
        setattr(part, name, wrap(part, getattr(part, name)))
    try:
        yield
    finally:
        for part in optimizer.chained_optimizers:
            delattr(part, name)


def _wrap_load_with_step(part: Any, load: Any) -> Any:
    """Megatron 0.16 copies every moment of torch's AdamW but has no step count to copy."""

    def load_with_step(parameter: Any, tensors: dict[str, Any]) -> None:
        group, place = part.model_param_group_index_map[parameter]
        main = part.optimizer.param_groups[group]["params"][place]
        load(parameter, {**tensors, "step": part.optimizer.state[main]["step"]})

    return load_with_step


def _unshare_steps(optimizer: Any) -> None:
    """Megatron 0.16 hands one step tensor to all parameters (distrib_optimizer.py, line 825).

    AdamW counts it up in place, once per parameter: its bias correction would be wrong from the
    first step after a load, without any error.
    """
    for part in optimizer.chained_optimizers:
        for moments in part.optimizer.state.values():
            moments["step"] = moments["step"].clone()


def _build_in_place_gather(part: Any, _: Any) -> Any:
    """Gather moments and master weights on the first data-parallel rank, each copied once.

    Megatron 0.16 leaves out the padding between buckets as it gathers, yet counts it later: with
    several pipeline stages a tied embedding has a bucket of its own, and all that lies behind it
    would be saved shifted. It also copies everything four times, most of a checkpoint's time.
    """

    def gather(
        *, empty_data: bool = False, return_on_all_ranks: bool = False, use_gloo_comm: bool = True
    ) -> dict[int, Any] | None:
        group = part.data_parallel_group_gloo
        is_kept = group.rank() == 0 or return_on_all_ranks
        state = {}
        for index, (buffer, ranges) in enumerate(zip(part.buffers, part.gbuf_ranges, strict=True)):
            ((dtype, buckets),) = ranges.items()
            sizes = [bucket.grad_data.numel() for bucket in buffer.buckets]
            whole = {
                name: torch.empty(sum(sizes) if is_kept else 0) for name in OPTIMIZER_STATE_NAMES
            }
            if not empty_data:
                for name, kept in whole.items():
                    # Of no elements on the other ranks, as is each of its parts.
                    places = torch.split(kept, sizes) if is_kept else [kept] * len(sizes)
                    for place, size, own in zip(places, sizes, buckets, strict=True):
                        _gather_bucket(part, name, own["param_map"], place, size // group.size())
            state[index] = {dtype: whole}
        return state if is_kept else None

    return gather


def _gather_bucket(
    part: Any, name: str, ranges: dict[Any, Any], place: torch.Tensor, share: int
) -> None:
    """Bring every rank's `share` elements of a bucket to their place on the first rank."""
    group = part.data_parallel_group_gloo
    own = place if group.size() == 1 else torch.empty(share)
    for parameter, found in ranges.items():
        moments = part._get_main_param_and_optimizer_states(parameter)
        local = found["gbuf_local"]
        own[local.start : local.end].copy_(moments[name].detach())
    if group.size() > 1:
        parts = list(place.chunk(group.size())) if group.rank() == 0 else None
        dist.gather(own, parts, dist.get_global_rank(group, 0), group)

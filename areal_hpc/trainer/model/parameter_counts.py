"""Parameter counts of networks and their parts, computed from sizes. Pure, no torch.

If a function returns two numbers, the second counts experts' parameters.
"""

from dataclasses import replace

from areal_hpc.recipe.sections.trainer import LoraConfig, ParallelConfig
from areal_hpc.trainer.model.families.architecture import (
    Architecture,
    list_stage_layers,
)


def count_layer_non_expert_parameters(arch: Architecture, layer: int, tp: int) -> int:
    """Count parameters of a layer on one tensor-parallel rank, without those of routed experts."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    qkv = (queries + 2 * keys) // tp
    count = 2 * arch.hidden + qkv * arch.hidden + queries // tp * arch.hidden
    count += qkv if arch.qkv_bias else 0
    count += 2 * arch.head_dim if arch.qk_norm else 0
    experts = arch.get_experts(layer)
    if experts is None:
        return count + 3 * arch.ffn // tp * arch.hidden
    # The router is whole on every rank.
    router = experts.count * (arch.hidden + experts.is_sigmoid)
    return count + router + 3 * experts.shared_ffn // tp * arch.hidden


def count_layer_expert_parameters(arch: Architecture, layer: int, ep: int) -> int:
    experts = arch.get_experts(layer)
    return 0 if experts is None else experts.count // ep * 3 * experts.ffn * arch.hidden


def count_embedding_parameters(arch: Architecture, tp: int) -> int:
    return -(-arch.vocab // tp) * arch.hidden


def count_stage_parameters(
    arch: Architecture, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    """Count parameters of one rank of a pipeline stage: others, then experts'."""
    if arch.parameters is not None:
        return arch.parameters.dense, arch.parameters.experts
    layers, last = list_stage_layers(arch.layers, parallel.pp, stage), parallel.pp - 1
    dense = sum(count_layer_non_expert_parameters(arch, layer, parallel.tp) for layer in layers)
    if stage == 0:
        dense += count_embedding_parameters(arch, parallel.tp)
    if stage == last:
        dense += arch.hidden
        if not arch.tied or last > 0:  # a tied head on another stage is a copy of the embedding
            dense += count_embedding_parameters(arch, parallel.tp)
    return dense, sum(count_layer_expert_parameters(arch, layer, parallel.ep) for layer in layers)


def count_trained_parameters(
    arch: Architecture, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    """Count parameters that have gradients and optimizer state, as `count_stage_parameters`."""
    if arch.lora is None:
        return count_stage_parameters(arch, parallel, stage)
    return count_adapter_parameters(arch, arch.lora), 0


def count_adapter_parameters(arch: Architecture, lora: LoraConfig) -> int:
    """Count parameters of an adapter on the layers of a plain decoder with the usual names.

    For a pattern or other names, all layers are counted.
    """
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    experts, width = (
        (1, arch.ffn) if arch.experts is None else (arch.experts.count, arch.experts.ffn)
    )
    rank = lora.rank
    counts = {"q_proj": rank * (arch.hidden + queries), "o_proj": rank * (arch.hidden + queries)}
    counts |= dict.fromkeys(("k_proj", "v_proj"), rank * (arch.hidden + keys))
    layers = ("gate_proj", "up_proj", "down_proj")
    counts |= dict.fromkeys(layers, rank * (arch.hidden + width) * experts)
    targets = lora.target_modules
    named = set() if isinstance(targets, str) else {target.rpartition(".")[2] for target in targets}
    return arch.layers * sum(counts[name] for name in named & counts.keys() or counts)


def count_model_parameters(arch: Architecture) -> int:
    return sum(count_stage_parameters(arch, ParallelConfig(), 0))


def count_critic_parameters(critic: Architecture) -> int:
    return sum(count_critic_stage_parameters(critic, ParallelConfig(), 0))


def get_side_layout(arch: Architecture, parallel: ParallelConfig) -> ParallelConfig:
    """Return the layout of a network beside the policy, which FSDP2 never divides."""
    ep = 1 if arch.experts is None else parallel.ep
    return parallel.model_copy(update={"ep": ep, "shard_parameters": False})


def count_critic_stage_parameters(
    critic: Architecture | None, parallel: ParallelConfig, stage: int
) -> tuple[int, int]:
    if critic is None:
        return 0, 0
    untied = replace(critic, tied=False)
    dense, experts = count_stage_parameters(untied, get_side_layout(critic, parallel), stage)
    if stage == parallel.pp - 1:
        dense += critic.hidden - count_embedding_parameters(critic, parallel.tp)
    return dense, experts

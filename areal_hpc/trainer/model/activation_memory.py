"""Memory that layers keep between forward and backward pass. Pure, no torch.

The count covers the tensors that each operation saves for its backward pass, as in Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): no dropout
(not even an adapter's), FlashAttention, tokens spread evenly over experts. Of recomputed layers one
at a time is counted. tests/integration/trainer/test_kept_activations.py measures it.

Megatron's layers use operations of this package: norms keep input and output, a gated MLP its
input; with tp > 1 sequences are parallel. Transformers' own modules are plain operations. Their
norms compute in float32 and keep two more tensors, their MLPs four; their gated delta rule, in
plain PyTorch, keeps the products of each chunk of tokens with itself. An unknown family is counted
with llama's layers.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_hpc.recipe.sections.trainer import Dtype, ParallelConfig, TrainerConfig
from areal_hpc.trainer.model.families.architecture import Architecture

BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2}
DELTA_RULE_CHUNK = 64
"""Tokens of a chunk (`chunk_size` in transformers' torch_chunk_gated_delta_rule)."""
_NORMED_QUERY_FAMILIES = ("qwen3", "gemma3", "olmo2", "olmo3")
"""Prefixes of the `model_type` of families whose queries and keys pass a norm..."""
_FLOAT32_NORM_FAMILIES = ("gemma", "olmo", "gpt_oss", "qwen3_next", "qwen3_5")
"""...whose norms keep the normalized values in float32..."""
_FOUR_NORM_FAMILIES = ("gemma2", "gemma3")
"""...whose attention and MLP each have a norm before and one after..."""
_GATED_ATTENTION_FAMILIES = ("qwen3_next", "qwen3_5")
"""...whose attention is gated..."""
_WRITTEN_OUT_ATTENTION_FAMILIES = ("gpt_oss", "gemma2")
"""...and whose attention scores are computed row by row: it has sinks, or scores are capped."""


def count_stage_activation_bytes(
    arch: Architecture, config: TrainerConfig, layers: range, tokens: int
) -> int:
    """Count bytes that the `layers` of a stage keep of a micro-batch from forward to backward."""
    parallel, activations = config.parallel, config.activations
    recomputed = activations.count_recomputed_layers(len(layers))
    is_selective = activations.recompute == "selective"
    if arch.transformers_config and activations.recompute != "none":
        recomputed = len(layers)
    element = BYTES_BY_DTYPE[config.dtype]
    inputs = recomputed * element * _count_values_per_rank(parallel, tokens, arch.hidden)
    if recomputed == len(layers):
        return inputs
    if arch.transformers_config:
        return sum(_list_layer_bytes(arch, parallel, config.dtype, tokens))
    kept = (
        _count_megatron_values(arch, layer, parallel, tokens, is_selective=is_selective)
        for layer in layers[recomputed:]
    )
    return inputs + element * sum(kept)


def count_layer_activation_bytes(
    arch: Architecture, parallel: ParallelConfig, dtype: Dtype, tokens: int
) -> int:
    """Count bytes that the largest layer keeps on one rank without recomputation.

    `tokens` are those of all context-parallel ranks.
    """
    if arch.transformers_config:
        return max(_list_layer_bytes(arch, parallel, dtype, tokens))
    largest = max(
        _count_megatron_values(arch, layer, parallel, tokens) for layer in range(arch.layers)
    )
    return BYTES_BY_DTYPE[dtype] * largest


def _count_values_per_rank(parallel: ParallelConfig, tokens: int, numbers: int) -> int:
    return tokens // parallel.cp * numbers // parallel.tp


def _count_seen_tokens(parallel: ParallelConfig, tokens: int) -> int:
    """Count the tokens, over all ranks, whose keys a rank's queries attend to, at most."""
    return tokens * (2 * parallel.cp + 1) // (2 * parallel.cp)


def _count_megatron_values(
    arch: Architecture,
    layer: int,
    parallel: ParallelConfig,
    tokens: int,
    *,
    is_selective: bool = False,
) -> int:
    """Count numbers that one of Megatron's layers keeps.

    These are the inputs and outputs of both norms; query, key and value as projected and as
    rotated; the attention's output; the MLP's gate, up and product. Selective recomputation keeps
    neither outputs of norms nor anything within the MLP.
    """
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    kept = 2 * arch.hidden + (queries + 2 * keys) + (queries + keys) + queries
    if not is_selective:
        kept += 2 * arch.hidden
        experts = arch.get_experts(layer)
        if experts is None:
            kept += 3 * arch.ffn
        else:  # sent tokens, gate, up and weighted product
            kept += experts.per_token * (arch.hidden + 3 * experts.ffn) + 3 * experts.shared_ffn
    numbers = _count_values_per_rank(parallel, tokens, kept)
    if parallel.cp > 1:
        numbers += 2 * keys * _count_seen_tokens(parallel, tokens) // parallel.tp
    return numbers


def _list_layer_bytes(
    arch: Architecture, parallel: ParallelConfig, dtype: Dtype, tokens: int
) -> list[int]:
    """List the bytes that each layer of transformers' own modules keeps."""
    config = json.loads(arch.transformers_config)
    modules = _PlainModules(arch, config.get("text_config") or config, BYTES_BY_DTYPE[dtype])
    local = tokens // parallel.cp
    sizes = []
    for layer in range(arch.layers):
        each = modules.count_input_bytes() + modules.count_mlp_bytes(layer)
        if modules.has_state(layer):
            sizes.append(local * (each + modules.count_delta_rule_bytes()))
            continue
        attended = local if parallel.cp == 1 else _count_seen_tokens(parallel, tokens)
        each += modules.count_attention_bytes(longest_row=local)
        sizes.append(local * each + attended * modules.count_key_value_bytes())
    return sizes


@dataclass(frozen=True, slots=True)
class _PlainModules:
    """Bytes that modules of transformers keep for each token."""

    arch: Architecture
    text: Mapping[str, Any]
    """Part of the configuration for text."""
    element: int
    """Bytes per number."""

    def _is_one_of(self, families: tuple[str, ...]) -> bool:
        return self.arch.family.startswith(families)

    def _count_norm(self, width: int) -> int:
        """Count the input in float32 and, for the weight's gradient, the normalized values."""
        is_float32 = self._is_one_of(_FLOAT32_NORM_FAMILIES)
        normed = 4 if is_float32 else self.element
        return width * (4 if self.arch.lora is not None else 4 + normed)

    def count_input_bytes(self) -> int:
        """Count the inputs of attention and MLP, and of the norms before and after them."""
        norms = 4 if self._is_one_of(_FOUR_NORM_FAMILIES) else 2
        return norms * self._count_norm(self.arch.hidden) + 2 * self.element * self.arch.hidden

    def has_state(self, layer: int) -> bool:
        if "linear_num_value_heads" not in self.text:  # another kind of state
            return False
        kinds = self.text.get("layer_types")
        if kinds is not None:
            return bool(kinds[layer] == "linear_attention")
        interval = self.text.get("full_attention_interval", 4)
        return self.arch.has_state_layers and (layer + 1) % interval != 0

    def count_key_value_bytes(self) -> int:
        """Count keys and values in the form in which they are attended to."""
        arch, text = self.arch, self.text
        if "kv_lora_rank" not in text:
            return self.element * 2 * arch.kv_heads * arch.head_dim
        nope = text["qk_nope_head_dim"]
        each = int(2 * nope + text["qk_rope_head_dim"] + text["v_head_dim"])
        return self.element * arch.heads * each  # values are a part of the projection

    def count_attention_bytes(self, longest_row: int) -> int:
        """Count everything but keys and values: queries, the output and the attention weights."""
        arch, text = self.arch, self.text
        queries = attended = arch.heads * arch.head_dim
        kept = 0
        if "kv_lora_rank" in text:
            queries = arch.heads * (text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
            attended = arch.heads * text["v_head_dim"]
            latents = (text.get("q_lora_rank") or 0) + text["kv_lora_rank"]
            kept += self._count_norm(latents) + self.element * latents
        elif self._is_one_of(_NORMED_QUERY_FAMILIES) or text.get("use_qk_norm"):
            kept += self._count_norm(queries + arch.kv_heads * arch.head_dim)
        if self._is_one_of(_GATED_ATTENTION_FAMILIES):  # the gate, and its product
            kept += 2 * self.element * attended
        kept += self.element * (queries + attended)
        if self._is_one_of(_WRITTEN_OUT_ATTENTION_FAMILIES):
            # Keys and values are copied for each query head; weights also stay in float32.
            copies = 2 * (arch.heads - arch.kv_heads) * arch.head_dim
            weights = arch.heads * longest_row
            return kept + self.element * copies + (4 + self.element) * weights + longest_row
        return kept + 4 * arch.heads  # the log-sum-exp

    def count_delta_rule_bytes(self) -> int:
        text, element = self.text, self.element
        heads, key_dim = int(text["linear_num_value_heads"]), int(text["linear_key_head_dim"])
        value_dim = int(text["linear_value_head_dim"])
        keys, values = heads * key_dim, heads * value_dim
        convolved = 2 * int(text["linear_num_key_heads"]) * key_dim + values
        kept = 2 * element * convolved  # before and after the convolution
        # Queries: raw, scaled, decayed. Keys: raw, normalized, times beta, cumulated, decayed.
        # Values: raw, new, minus the prediction from the state.
        kept += 4 * (3 * keys + 5 * keys + 3 * values)
        # Two products of a chunk with itself, before and after the decay, and the decay.
        kept += 4 * 5 * heads * DELTA_RULE_CHUNK
        kept += 4 * keys * value_dim // DELTA_RULE_CHUNK  # the state
        # The norm's input, output and gate in float32, the gate's silu; normed and gated values.
        return kept + (12 + 3 * element) * values

    def count_mlp_bytes(self, layer: int) -> int:
        arch, text, element = self.arch, self.text, self.element
        if arch.experts is None or self._is_dense(layer):
            return element * 4 * arch.ffn
        # Gate, its activation, up and product; gpt_oss also clamps gate and up, and adds 1.
        parts = 7 if self._is_one_of(("gpt_oss",)) else 4
        visit = 2 * arch.hidden + parts * arch.experts.ffn
        kept = arch.experts.per_token * element * visit + 4 * arch.experts.count
        if "n_shared_experts" in text:
            shared = arch.experts.ffn * (text["n_shared_experts"] or 0)
            # Their routers compute in float32.
            return kept + 4 * element * shared + (4 * arch.hidden if element < 4 else 0)
        if width := text.get("shared_expert_intermediate_size"):
            kept += element * (4 * int(width) + arch.hidden)
        return kept

    def _is_dense(self, layer: int) -> bool:
        text = self.text
        return (
            layer < (text.get("first_k_dense_replace") or 0)
            or layer in (text.get("mlp_only_layers") or ())
            or (layer + 1) % (text.get("decoder_sparse_step") or 1) != 0
        )

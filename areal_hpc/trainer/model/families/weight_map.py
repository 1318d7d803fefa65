"""Map from Hugging Face tensors to Megatron parameters, and their division over ranks.

The table is data: one `ParamMap` per Megatron parameter, in export order. A new family adds
rows (`_list_layer_parameters`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from areal_hpc.trainer.model.families.architecture import Architecture

TensorShape = tuple[int, ...]


class TpSplit(Enum):
    """Division of one Megatron parameter over tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    VOCAB = "by rows, after padding the rows to a multiple of the ranks"
    WEIGHT_COLUMNS = "by columns"
    QKV = "query, key, value interleaved by key-value head, then by rows"
    GATE_UP = "each rank holds its rows of the gate, then its rows of the up projection"
    STACKED = "every rank holds all of it; what a checkpoint has is made from it"


@dataclass(frozen=True, slots=True)
class HfTensorSpec:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: TensorShape


@dataclass(frozen=True, slots=True)
class ParamMap:
    """One Megatron parameter. Indices of layers and experts refer to the whole network."""

    megatron: str
    """Name below the expert or the layer, or the whole name when both are None."""
    hf: tuple[HfTensorSpec, ...]
    cut: TpSplit
    layer: int | None = None
    """Global index of the decoder layer."""
    expert: int | None = None
    """Global index of the expert; experts are never divided over tensor-parallel ranks."""
    shape: TensorShape = ()
    """Shape of a stacked parameter."""
    is_buffer: bool = False
    """Whether it is a buffer, which keeps its dtype and comes only from the model's files."""
    is_trained: bool = True


EMBEDDING_NAME = "embedding.word_embeddings.weight"
FINAL_NORM_NAME = "decoder.final_layernorm.weight"
OUTPUT_LAYER_NAME = "output_layer.weight"


def list_parameter_maps(arch: Architecture) -> list[ParamMap]:
    """List every parameter of the network, first layer first. A tied head is not listed."""
    if arch.transformers_config:
        names = _read_names(arch)
        return [
            ParamMap(
                name,
                tuple(HfTensorSpec(*spec) for spec in stored),
                TpSplit.STACKED,
                shape=shape,
                is_buffer=name not in names.trained,
                is_trained=arch.lora is None and name in names.trained,
            )
            for name, shape, stored in names.list_tensors()
        ]
    words = (arch.vocab, arch.hidden)
    embed = HfTensorSpec("model.embed_tokens.weight", words)
    norm = HfTensorSpec("model.norm.weight", (arch.hidden,))
    table = [ParamMap(EMBEDDING_NAME, (embed,), TpSplit.VOCAB)]
    for layer in range(arch.layers):
        table += _list_layer_parameters(arch, layer)
    table.append(ParamMap(FINAL_NORM_NAME, (norm,), TpSplit.WHOLE))
    if not arch.tied:
        table.append(
            ParamMap(OUTPUT_LAYER_NAME, (HfTensorSpec("lm_head.weight", words),), TpSplit.VOCAB)
        )
    return table


def _list_layer_parameters(arch: Architecture, layer: int) -> Iterator[ParamMap]:
    hidden, head_dim = arch.hidden, arch.head_dim
    widths = {"q": arch.heads * head_dim, "k": arch.kv_heads * head_dim}
    widths["v"] = widths["k"]

    def row(
        megatron: str, cut: TpSplit, shapes: Mapping[str, TensorShape], expert: int | None = None
    ) -> ParamMap:
        tensors = (
            HfTensorSpec(f"model.layers.{layer}.{name}", shape) for name, shape in shapes.items()
        )
        return ParamMap(megatron, tuple(tensors), cut, layer, expert)

    def mlp(megatron: str, hf: str, ffn: int, expert: int | None = None) -> Iterator[ParamMap]:
        gate_up = {f"{hf}.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
        yield row(f"{megatron}linear_fc1.weight", TpSplit.GATE_UP, gate_up, expert)
        down = {f"{hf}.down_proj.weight": (hidden, ffn)}
        yield row(f"{megatron}linear_fc2.weight", TpSplit.WEIGHT_COLUMNS, down, expert)

    def qkv(kind: str, *trailing: int) -> ParamMap:
        shapes = {
            f"self_attn.{part}_proj.{kind}": (width, *trailing) for part, width in widths.items()
        }
        return row(f"self_attention.linear_qkv.{kind}", TpSplit.QKV, shapes)

    def norm(megatron: str, hf: str, width: int) -> ParamMap:
        return row(f"{megatron}.weight", TpSplit.WHOLE, {f"{hf}.weight": (width,)})

    yield norm("input_layernorm", "input_layernorm", hidden)
    yield qkv("weight", hidden)
    if arch.qkv_bias:
        yield qkv("bias")
    if arch.qk_norm:
        for part in "qk":
            yield norm(f"self_attention.{part}_layernorm", f"self_attn.{part}_norm", head_dim)
    out = {"self_attn.o_proj.weight": (hidden, widths["q"])}
    yield row("self_attention.linear_proj.weight", TpSplit.WEIGHT_COLUMNS, out)
    yield norm("pre_mlp_layernorm", "post_attention_layernorm", hidden)
    experts = arch.get_experts(layer)
    if experts is None:
        yield from mlp("mlp.", "mlp", arch.ffn)
        return
    router = {"mlp.gate.weight": (experts.count, hidden)}
    yield row("mlp.router.weight", TpSplit.WHOLE, router)
    if experts.is_sigmoid:
        bias = {"mlp.gate.e_score_correction_bias": (experts.count,)}
        parameter = row("mlp.router.expert_bias", TpSplit.WHOLE, bias)
        yield replace(parameter, is_buffer=True, is_trained=False)
    for expert in range(experts.count):
        yield from mlp("", f"mlp.experts.{expert}", experts.ffn, expert)
    if experts.shared_ffn:
        yield from mlp("mlp.shared_experts.", "mlp.shared_experts", experts.shared_ffn)


def _read_names(arch: Architecture) -> Any:
    # transformers is imported only for its own networks, not for those of Megatron's layers.
    from areal_hpc.trainer.model.families.transformers_modules import read_tensor_names

    return read_tensor_names(arch.transformers_config, arch.parameters)


def compute_padded_vocab_size(arch: Architecture, tp: int) -> int:
    return -(-arch.vocab // tp) * tp


def count_tp_shards(parameter: ParamMap, tp: int) -> int:
    is_whole = parameter.cut in (TpSplit.WHOLE, TpSplit.STACKED) or parameter.expert is not None
    return 1 if is_whole else tp


def get_shard_shape(parameter: ParamMap, arch: Architecture, tp: int) -> TensorShape:
    """Return the shape of one rank's part of the Megatron parameter."""
    first, *trailing = parameter.hf[0].shape
    ranks = count_tp_shards(parameter, tp)
    match parameter.cut:
        case TpSplit.WHOLE:
            return parameter.hf[0].shape
        case TpSplit.STACKED:
            return parameter.shape
        case TpSplit.VOCAB:
            return (compute_padded_vocab_size(arch, ranks) // ranks, *trailing)
        case TpSplit.WEIGHT_COLUMNS:
            return (first, trailing[0] // ranks)
        case TpSplit.QKV | TpSplit.GATE_UP:
            return (sum(tensor.shape[0] for tensor in parameter.hf) // ranks, *trailing)


def get_hf_slices(
    parameter: ParamMap, arch: Architecture, tp: int, rank: int
) -> list[tuple[slice, ...]]:
    """Return the slices of each Hugging Face tensor of the parameter that rank `rank` needs."""
    ranks = count_tp_shards(parameter, tp)
    match parameter.cut:
        case TpSplit.WHOLE | TpSplit.STACKED:
            return [()] * len(parameter.hf)
        case TpSplit.VOCAB:
            rows = compute_padded_vocab_size(arch, ranks) // ranks
            first, last = (min(index * rows, arch.vocab) for index in (rank, rank + 1))
            return [(slice(first, last),)]
        case TpSplit.WEIGHT_COLUMNS:
            return [(slice(None), _get_rank_slice(parameter.hf[0].shape[1], ranks, rank))]
        case TpSplit.GATE_UP | TpSplit.QKV:
            # A rank holds whole key-value heads and the query heads that belong to them.
            return [(_get_rank_slice(tensor.shape[0], ranks, rank),) for tensor in parameter.hf]


def _get_rank_slice(size: int, ranks: int, rank: int) -> slice:
    part = size // ranks
    return slice(0, size) if ranks == 1 else slice(rank * part, (rank + 1) * part)


def to_megatron(
    parameter: ParamMap, hf_slices: Sequence[torch.Tensor], arch: Architecture, tp: int
) -> torch.Tensor:
    """Build one rank's part of the Megatron parameter from its slices (`get_hf_slices`)."""
    first, trailing = hf_slices[0], hf_slices[0].shape[1:]
    match parameter.cut:
        case TpSplit.WHOLE | TpSplit.WEIGHT_COLUMNS:
            return first
        case TpSplit.VOCAB:
            rows = get_shard_shape(parameter, arch, tp)[0]
            return torch.cat([first, first.new_zeros((rows - len(first), *trailing))])
        case TpSplit.STACKED:
            stored = zip((spec.name for spec in parameter.hf), hf_slices, strict=True)
            whole: torch.Tensor = _read_names(arch).from_stored(dict(stored))
            return whole
        case TpSplit.GATE_UP:
            return torch.cat(list(hf_slices))
        case TpSplit.QKV:
            kv_heads = arch.kv_heads // count_tp_shards(parameter, tp)
            by_head = [part.reshape(kv_heads, -1, *trailing) for part in hf_slices]
            return torch.cat(by_head, 1).reshape(-1, *trailing)


def to_hf(
    parameter: ParamMap, shards: Sequence[torch.Tensor], arch: Architecture
) -> list[torch.Tensor]:
    """Build whole Hugging Face tensors from the parts of all ranks that divide the parameter."""
    match parameter.cut:
        case TpSplit.WHOLE:
            return [shards[0]]
        case TpSplit.STACKED:
            return list(_read_names(arch).to_stored(parameter.megatron, shards[0]).values())
        case TpSplit.VOCAB:
            return [torch.cat(list(shards))[: arch.vocab]]
        case TpSplit.WEIGHT_COLUMNS:
            return [torch.cat(list(shards), 1)]
        case TpSplit.GATE_UP:
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat([half[part] for half in halves]) for part in (0, 1)]
        case TpSplit.QKV:
            per_group = arch.heads // arch.kv_heads
            whole = torch.cat(list(shards))
            grouped = whole.reshape(arch.kv_heads, per_group + 2, -1, *whole.shape[1:])
            parts = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
            return [part.reshape(-1, *whole.shape[1:]) for part in parts]

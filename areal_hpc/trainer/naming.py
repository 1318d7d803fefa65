"""Which Hugging Face tensors make up which Megatron parameter, and how tensor parallelism cuts it.

The table is data: one `Parameter` per Megatron parameter, in export order. A new family adds
rows (`_attention`, `_dense_mlp`); a mixture of experts adds another function beside `_dense_mlp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from areal_hpc.trainer.architecture import Architecture

Shape = tuple[int, ...]


class Cut(Enum):
    """How one Megatron parameter is divided over tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    VOCAB = "by rows, after padding the rows to a multiple of the ranks"
    COLUMNS = "by columns"
    QKV = "query, key, value interleaved by key-value head, then by rows"
    GATE_UP = "each rank holds its rows of the gate, then its rows of the up projection"


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of a Hugging Face checkpoint."""

    name: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter. `{layer}` is cut out of `megatron`: stages number layers locally."""

    megatron: str
    """Name below the layer, or the whole name when `layer` is None."""
    hf: tuple[HfTensor, ...]
    cut: Cut
    layer: int | None = None
    """Global index of the decoder layer."""


EMBEDDING = "embedding.word_embeddings.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
OUTPUT = "output_layer.weight"


def name_table(arch: Architecture) -> list[Parameter]:
    """Every parameter of the network, first layer first. A tied head is not listed."""
    embed = HfTensor("model.embed_tokens.weight", (arch.vocab, arch.hidden))
    table = [Parameter(EMBEDDING, (embed,), Cut.VOCAB)]
    for layer in range(arch.layers):
        table += _attention(arch, layer) + _dense_mlp(arch, layer)
    table.append(Parameter(FINAL_NORM, (HfTensor("model.norm.weight", (arch.hidden,)),), Cut.WHOLE))
    if not arch.tied:
        head = HfTensor("lm_head.weight", (arch.vocab, arch.hidden))
        table.append(Parameter(OUTPUT, (head,), Cut.VOCAB))
    return table


def _attention(arch: Architecture, layer: int) -> list[Parameter]:
    prefix = f"model.layers.{layer}."
    widths = {
        "q": arch.heads * arch.head_dim,
        "k": arch.kv_heads * arch.head_dim,
        "v": arch.kv_heads * arch.head_dim,
    }

    def whole(megatron: str, name: str, width: int) -> Parameter:
        return Parameter(megatron, (HfTensor(prefix + name, (width,)),), Cut.WHOLE, layer)

    def qkv(kind: str, *trailing: int) -> Parameter:
        tensors = tuple(
            HfTensor(f"{prefix}self_attn.{part}_proj.{kind}", (width, *trailing))
            for part, width in widths.items()
        )
        return Parameter(f"self_attention.linear_qkv.{kind}", tensors, Cut.QKV, layer)

    rows = [
        whole("input_layernorm.weight", "input_layernorm.weight", arch.hidden),
        qkv("weight", arch.hidden),
    ]
    if arch.qkv_bias:
        rows.append(qkv("bias"))
    if arch.qk_norm:
        rows += [
            whole(
                f"self_attention.{part}_layernorm.weight",
                f"self_attn.{part}_norm.weight",
                arch.head_dim,
            )
            for part in "qk"
        ]
    out = HfTensor(prefix + "self_attn.o_proj.weight", (arch.hidden, widths["q"]))
    return [*rows, Parameter("self_attention.linear_proj.weight", (out,), Cut.COLUMNS, layer)]


def _dense_mlp(arch: Architecture, layer: int) -> list[Parameter]:
    prefix = f"model.layers.{layer}."
    norm = HfTensor(prefix + "post_attention_layernorm.weight", (arch.hidden,))
    gate_up = tuple(
        HfTensor(f"{prefix}mlp.{part}_proj.weight", (arch.ffn, arch.hidden))
        for part in ("gate", "up")
    )
    down = HfTensor(prefix + "mlp.down_proj.weight", (arch.hidden, arch.ffn))
    return [
        Parameter("pre_mlp_layernorm.weight", (norm,), Cut.WHOLE, layer),
        Parameter("mlp.linear_fc1.weight", gate_up, Cut.GATE_UP, layer),
        Parameter("mlp.linear_fc2.weight", (down,), Cut.COLUMNS, layer),
    ]


def padded_vocab(arch: Architecture, tp: int) -> int:
    """Rows of the embedding once every tensor-parallel rank holds equally many."""
    return -(-arch.vocab // tp) * tp


def shard_shape(parameter: Parameter, arch: Architecture, tp: int) -> Shape:
    """Shape of one rank's part of the Megatron parameter."""
    first, *trailing = parameter.hf[0].shape
    match parameter.cut:
        case Cut.WHOLE:
            return parameter.hf[0].shape
        case Cut.VOCAB:
            return (padded_vocab(arch, tp) // tp, *trailing)
        case Cut.COLUMNS:
            return (first, trailing[0] // tp)
        case Cut.QKV | Cut.GATE_UP:
            return (sum(tensor.shape[0] for tensor in parameter.hf) // tp, *trailing)


def to_megatron(
    parameter: Parameter, tensors: Sequence[torch.Tensor], arch: Architecture, tp: int, rank: int
) -> torch.Tensor:
    """Rank `rank`'s part of the Megatron parameter from its whole Hugging Face tensors."""
    first = tensors[0]
    match parameter.cut:
        case Cut.WHOLE:
            return first
        case Cut.VOCAB:
            missing = padded_vocab(arch, tp) - arch.vocab
            padding = first.new_zeros((missing, *first.shape[1:]))
            return torch.cat([first, padding]).chunk(tp)[rank]
        case Cut.COLUMNS:
            return first.chunk(tp, 1)[rank]
        case Cut.GATE_UP:
            return torch.cat([tensor.chunk(tp)[rank] for tensor in tensors])
        case Cut.QKV:
            trailing = first.shape[1:]
            by_head = [tensor.reshape(arch.kv_heads, -1, *trailing) for tensor in tensors]
            return torch.cat(by_head, 1).reshape(-1, *trailing).chunk(tp)[rank]


def to_hf(
    parameter: Parameter, shards: Sequence[torch.Tensor], arch: Architecture
) -> list[torch.Tensor]:
    """The inverse of `to_megatron`: whole Hugging Face tensors from every rank's part."""
    match parameter.cut:
        case Cut.WHOLE:
            return [shards[0]]
        case Cut.VOCAB:
            return [torch.cat(list(shards))[: arch.vocab]]
        case Cut.COLUMNS:
            return [torch.cat(list(shards), 1)]
        case Cut.GATE_UP:
            halves = [shard.chunk(2) for shard in shards]
            return [torch.cat([half[part] for half in halves]) for part in (0, 1)]
        case Cut.QKV:
            per_group = arch.heads // arch.kv_heads
            whole = torch.cat(list(shards))
            grouped = whole.reshape(arch.kv_heads, per_group + 2, -1, *whole.shape[1:])
            parts = grouped[:, :per_group], grouped[:, per_group], grouped[:, per_group + 1]
            return [part.reshape(-1, *whole.shape[1:]) for part in parts]

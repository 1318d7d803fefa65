"""Architecture of a network, from a model directory's `config.json`. Pure, no torch."""

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from areal_hpc.errors import Problem, RecipeError
from areal_hpc.recipe.sections.trainer import LoraConfig, ParallelConfig
from areal_hpc.wire.trajectory import MixtureShape, parse_mixture_shape

GLM_MOE = "glm4_moe"
MEGATRON_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", GLM_MOE)
"""Model types built from Megatron's layers. Other decoders use transformers' own modules."""
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Stretched rotary frequencies of Llama 3.1 (transformers' rope type `llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Stretched rotary frequencies of YaRN (arXiv 2309.00071; transformers' rope type `yarn`)."""

    factor: float
    original_positions: int
    beta_fast: float
    """Pairs that turn more often than this within the original positions are kept..."""
    beta_slow: float
    """...pairs that turn less often than this are stretched by the factor."""
    attention_factor: float
    """Scale of rotated queries and keys."""


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Feed-forward layers of a mixture of experts."""

    count: int
    per_token: int
    """Experts that each token visits."""
    ffn: int
    """Width of one expert."""
    norm_weights: bool
    """Whether the weights of the experts that a token visits are scaled to sum to 1."""
    dense_layers: int = 0
    """Number of first layers without experts, which are `Architecture.ffn` wide."""
    shared_ffn: int = 0
    """Width of all shared experts together, which every token visits; 0 without any."""
    is_sigmoid: bool = False
    """Whether scores are sigmoids, and a bias that is never trained corrects them for the choice
    of experts."""
    groups: int = 1
    chosen_groups: int = 1
    """Number of groups whose experts a token may visit."""
    scale: float = 1.0
    """Factor of the weights of a token's experts."""


@dataclass(frozen=True, slots=True)
class StoredParameters:
    """Numbers in the files of a model, and the names of its tensors there."""

    dense: int
    """Numbers outside of experts, including embeddings."""
    experts: int
    prefix: str = "model."
    """Prefix of the decoder's names. If it is longer, exports keep tensors without it, such as
    towers for images; with the plain prefix exports omit them."""
    head: str = _HEAD
    has_stacked_experts: bool = False
    """Whether the experts of a layer are one tensor."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a decoder."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | YarnRopeScaling | None
    tied: bool
    """Whether input embedding and output head are one matrix."""
    experts: MoeConfig | None = None
    """Mixture of experts; None for a dense network, whose feed-forward layers are `ffn` wide."""
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_share: float = 1.0
    """Share of each head, from its start, that is rotated."""
    transformers_config: str = ""
    """`config.json` of a network of transformers' own modules; empty for Megatron's layers."""
    parameters: StoredParameters | None = None
    """Parameters of such a network, if its files are available."""
    has_state_layers: bool = False
    """Whether some layers carry a state from token to token, like the gated delta rule."""
    lora: LoraConfig | None = None
    """Adapter that is trained in place of the weights, on transformers' own modules."""

    @property
    def mixture(self) -> MixtureShape | None:
        """Shape of tokens' routes; None for a dense network."""
        experts = self.experts
        return MixtureShape(self.layers, experts.per_token, experts.count) if experts else None

    @property
    def has_equal_layers(self) -> bool:
        return self.experts is None or self.experts.dense_layers == 0

    def get_experts(self, layer: int) -> MoeConfig | None:
        """Return the mixture of one of Megatron's layers; None for a dense layer."""
        experts = self.experts
        return None if experts is None or layer < experts.dense_layers else experts

    def compute_rope_frequencies(self) -> list[float]:
        """Return the angle per position of each rotary pair."""
        rotated = int(self.head_dim * self.rotary_share)
        plain = [self.rope_theta ** -(pair / rotated) for pair in range(0, rotated, 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if isinstance(scaling, YarnRopeScaling):
            return _stretch_by_yarn(plain, scaling, self.rope_theta)
        return [_scale_frequency_by_llama3(frequency, scaling) for frequency in plain]

    @property
    def rope_attention_factor(self) -> float:
        scaling = self.rope_scaling
        return scaling.attention_factor if isinstance(scaling, YarnRopeScaling) else 1.0


def read_architecture(model_dir: Path, lora: LoraConfig | None = None) -> Architecture:
    """Read the architecture of a Hugging Face model directory; `lora` adds an adapter to train.

    Raises:
        RecipeError: The directory holds no `config.json`, one that is not JSON, or a network that
            is not supported.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise RecipeError(
            f"a model directory holds config.json, found none in {model_dir}",
            key="model.path",
            hint="point at a directory saved by save_pretrained",
        )
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise RecipeError(
            f"the configuration is not JSON: {error}", key=str(path), hint="copy the model again"
        ) from error
    arch = parse_architecture(config, str(path), lora)
    if not arch.transformers_config:
        return arch
    return replace(arch, parameters=read_stored_parameters(model_dir))


def read_stored_parameters(model_dir: Path) -> StoredParameters | None:
    """Read the headers of a model's safetensors files; None without files."""
    shapes: dict[str, list[int]] = {}
    for file in model_dir.glob("*.safetensors"):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        shapes |= {name: tensor["shape"] for name, tensor in header.items() if "shape" in tensor}
    # A layer that predicts further tokens may have an embedding of its own, with a longer name.
    embedding = min((name for name in shapes if name.endswith(_EMBEDDING)), key=len, default="")
    if not embedding:
        return None
    prefix = embedding.removesuffix(_EMBEDDING)
    head = min((name for name in shapes if name.endswith(_HEAD)), key=len, default=_HEAD)
    decoder = {name: shape for name, shape in shapes.items() if name.startswith((prefix, head))}
    experts = sum(math.prod(shape) for name, shape in decoder.items() if ".experts." in name)
    return StoredParameters(
        dense=sum(map(math.prod, decoder.values())) - experts,
        experts=experts,
        prefix=prefix,
        head=head,
        has_stacked_experts=any(name.endswith("experts.gate_up_proj") for name in decoder),
    )


def parse_architecture(
    config: Mapping[str, Any], config_file: str, lora: LoraConfig | None = None
) -> Architecture:
    """Parse the network of a `config.json`; `config_file` names the file in errors.

    Raises:
        RecipeError: The network is not supported, or its description is incomplete.
    """
    try:
        if lora is None:
            return _parse_config(config, config_file)
        family = config.get("model_type", "")
        return replace(_parse_for_transformers(family, config, config_file), lora=lora)
    except KeyError as error:
        raise RecipeError(
            f"the configuration has no {error.args[0]}",
            key=config_file,
            hint="save it again with save_pretrained",
        ) from None


def _parse_config(config: Mapping[str, Any], config_file: str) -> Architecture:
    family = config.get("model_type", "")
    if family not in MEGATRON_MODEL_TYPES or not _fits_megatron_layers(config):
        return _parse_for_transformers(family, config, config_file)
    heads = int(config["num_attention_heads"])
    rope = config.get("rope_parameters") or {}
    is_glm = family == GLM_MOE
    return Architecture(
        family=family,
        layers=int(config["num_hidden_layers"]),
        hidden=int(config["hidden_size"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        ffn=int(config["intermediate_size"]),
        vocab=int(config["vocab_size"]),
        norm_eps=float(config["rms_norm_eps"]),
        # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        rope_scaling=_parse_rope_scaling(rope or config.get("rope_scaling") or {}),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_parse_experts(config) if family.endswith("_moe") else None,
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=family in ("qwen3", "qwen3_moe") or bool(config.get("use_qk_norm")),
        rotary_share=float({**config, **rope}.get("partial_rotary_factor", 0.5)) if is_glm else 1.0,
    )


def _fits_megatron_layers(config: Mapping[str, Any]) -> bool:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = _get_rope_kind(rope)
    fits_rope = kind in ("default", "llama3") or (
        kind == "yarn"
        and not {"mscale", "mscale_all_dim"}.intersection(rope)
        and rope.get("truncate", True)
    )
    if config["model_type"] == GLM_MOE:
        # Megatron always scales several sigmoids to sum to 1, and never a single one. It compares
        # groups by as many experts as a token visits in each, transformers by two.
        per_token, groups = config["num_experts_per_tok"], config.get("n_group", 1)
        fits_groups = groups == 1 or per_token == 2 * config["topk_group"]
        return fits_rope and fits_groups and per_token > 1 and config.get("norm_topk_prob", True)
    has_other_layers = any(
        config.get(key)
        for key in ("attention_bias", "mlp_bias", "use_sliding_window", "mlp_only_layers")
    )
    return fits_rope and not has_other_layers and config.get("decoder_sparse_step", 1) == 1


def _parse_for_transformers(
    family: str, config: Mapping[str, Any], config_file: str
) -> Architecture:
    text = config.get("text_config") or config
    generates = ("ForCausalLM", "ForConditionalGeneration")
    named = config.get("architectures") or [generates[0]]
    if "num_attention_heads" not in text or not named[0].endswith(generates):
        raise RecipeError(
            f"expected a causal language model with attention, got model_type {family!r}",
            key=config_file,
            hint="choose a model that transformers and SGLang know as one",
        )
    heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    mixture = parse_mixture_shape(config)
    width = int(text.get("intermediate_size") or text.get("moe_intermediate_size") or 0)
    return Architecture(
        family=family,
        layers=int(text["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        ffn=width,
        vocab=int(text["vocab_size"]),
        norm_eps=0.0,
        rope_theta=1.0,
        rope_scaling=None,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        experts=MoeConfig(
            count=mixture.experts,
            per_token=mixture.per_token,
            ffn=int(text.get("moe_intermediate_size") or width),
            norm_weights=True,
        )
        if mixture
        else None,
        transformers_config=json.dumps(config),
        has_state_layers="linear_attention" in (text.get("layer_types") or ())
        or bool(text.get("linear_num_value_heads")),
    )


def _parse_experts(config: Mapping[str, Any]) -> MoeConfig:
    per_token, ffn = int(config["num_experts_per_tok"]), int(config["moe_intermediate_size"])
    if config["model_type"] == GLM_MOE:
        return MoeConfig(
            count=int(config["n_routed_experts"]),
            per_token=per_token,
            ffn=ffn,
            norm_weights=True,
            dense_layers=int(config.get("first_k_dense_replace", 1)),
            shared_ffn=int(config.get("n_shared_experts", 1)) * ffn,
            is_sigmoid=True,
            groups=int(config.get("n_group", 1)),
            chosen_groups=int(config.get("topk_group", 1)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
        )
    return MoeConfig(
        # transformers 5 may write num_local_experts for num_experts.
        count=int(config.get("num_experts") or config["num_local_experts"]),
        per_token=per_token,
        ffn=ffn,
        norm_weights=bool(config.get("norm_topk_prob", False)),
    )


def divide_layers_over_stages(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage.

    If they do not divide evenly, some stages have one more: those in the middle, from the back, as
    the first stage has the embedding and holds the most micro-batches; never the last stage, which
    has the head.
    """
    each, remainder = divmod(layers, stages)
    return tuple(each + (0 < stages - 1 - stage <= remainder) for stage in range(stages))


def list_stage_layers(layers: int, stages: int, stage: int) -> range:
    counts = divide_layers_over_stages(layers, stages)
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def find_stage_of_layer(layer: int, layers: int, stages: int) -> int:
    return bisect.bisect_right(
        [*itertools.accumulate(divide_layers_over_stages(layers, stages))], layer
    )


def find_layout_problems(arch: Architecture, parallel: ParallelConfig) -> Iterator[Problem]:
    """Find sizes that the parallel sizes do not divide, and layouts that the network lacks."""
    if arch.transformers_config:
        yield from _find_problems_of_whole_layers(arch, parallel)
        return
    if parallel.shard_parameters:
        yield Problem(
            f"{arch.family} has layers of Megatron-core, whose weights tp and pp divide",
            "trainer.parallel.shard_parameters",
            "leave it out, and raise tp or pp if a GPU cannot hold the model",
        )
    if arch.layers < parallel.pp:
        yield Problem(
            f"each pipeline stage needs a layer: num_hidden_layers is {arch.layers}, "
            f"pp {parallel.pp}",
            "trainer.parallel.pp",
            f"use at most {arch.layers}",
        )
    cuts = [
        ("num_attention_heads", arch.heads, "tp", parallel.tp),
        ("num_key_value_heads", arch.kv_heads, "tp", parallel.tp),
    ]
    if arch.experts is not None:
        cuts.append(("num_experts", arch.experts.count, "ep", parallel.ep))
        shared = arch.experts.shared_ffn
        cuts.append(("moe_intermediate_size of all shared experts", shared, "tp", parallel.tp))
    else:
        cuts.append(("the number of experts of a dense network,", 1, "ep", parallel.ep))
    if arch.get_experts(0) is None:
        cuts.append(("intermediate_size", arch.ffn, "tp", parallel.tp))
    for size_name, size, key, parts in cuts:
        if size % parts:
            yield Problem(
                f"{size_name} {size} must be a multiple of {key} {parts}",
                f"trainer.parallel.{key}",
                f"use a divisor of {size}",
            )


def _find_problems_of_whole_layers(
    arch: Architecture, parallel: ParallelConfig
) -> Iterator[Problem]:
    families = ", ".join(MEGATRON_MODEL_TYPES)
    trained, divided = arch.family, families
    way_out = " (trainer.parallel.shard_parameters=true divides what a GPU cannot hold)"
    if arch.lora is not None:
        trained, divided = "an adapter (trainer.lora)", f"all weights of {families}"
        way_out = ""
    for key in ("tp", "pp", "ep"):
        if getattr(parallel, key) > 1:
            yield Problem(
                f"{trained} is trained with transformers' own layers, which are not divided; "
                f"{key} is for {divided}",
                f"trainer.parallel.{key}",
                f"use trainer.parallel.{key}=1, and dp or cp in its place{way_out}",
            )
    if parallel.cp > 1 and arch.has_state_layers:
        yield Problem(
            f"{arch.family} has layers whose state passes from token to token; "
            "a row cannot be divided over ranks",
            "trainer.parallel.cp",
            "use trainer.parallel.cp=1 and a dp as large",
        )


def _get_rope_kind(rope: Mapping[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"


def _parse_rope_scaling(rope: Mapping[str, Any]) -> Llama3RopeScaling | YarnRopeScaling | None:
    kind = _get_rope_kind(rope)
    if kind == "default":
        return None
    if kind == "yarn":
        return _parse_yarn(rope)
    return Llama3RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_positions=int(rope["original_max_position_embeddings"]),
    )


def _parse_yarn(rope: Mapping[str, Any]) -> YarnRopeScaling:
    factor = float(rope["factor"])
    by_paper = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return YarnRopeScaling(
        factor=factor,
        original_positions=int(rope["original_max_position_embeddings"]),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        attention_factor=float(rope.get("attention_factor") or by_paper),
    )


def _stretch_by_yarn(
    frequencies: Sequence[float], scaling: YarnRopeScaling, theta: float
) -> list[float]:
    """Divide frequencies of slow pairs by the factor, keep those of fast pairs, and mix in between.

    This follows transformers' modeling_rope_utils.py.
    """
    pairs = len(frequencies)

    def find_pair(turns: float) -> float:
        ratio = scaling.original_positions / (turns * 2 * math.pi)
        return pairs * math.log(ratio) / math.log(theta)

    first = max(0, math.floor(find_pair(scaling.beta_fast)))
    last = min(2 * pairs - 1, math.ceil(find_pair(scaling.beta_slow)))
    span = (last - first) or 0.001
    stretched = []
    for pair, frequency in enumerate(frequencies):
        slow = min(1.0, max(0.0, (pair - first) / span))
        stretched.append(frequency * (slow / scaling.factor + 1 - slow))
    return stretched


def _scale_frequency_by_llama3(frequency: float, scaling: Llama3RopeScaling) -> float:
    turns = scaling.original_positions * frequency / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept = min(1.0, max(0.0, (turns - scaling.low_freq_factor) / span))
    return frequency * (kept + (1 - kept) / scaling.factor)

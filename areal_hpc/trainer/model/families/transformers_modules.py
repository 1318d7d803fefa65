"""Networks of transformers' own modules, run on packs by Megatron's schedule and optimizer.

Any decoder that transformers defines can be trained, without tensor or pipeline parallelism. A pack
enters the modules as one sequence: positions restart with each row, and the three operations that
look across rows get the rows' bounds: attention, the mask (which is none), and the gated delta rule
with its convolution.
"""

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_init_weights
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from areal_hpc.errors import RecipeError
from areal_hpc.trainer.model.attention import (
    AttentionPlan,
    VarlenAttention,
    can_use_flash,
    plan_varlen_attention,
)
from areal_hpc.trainer.model.families.architecture import StoredParameters

ATTENTION_NAME = "areal_hpc"
"""Name of this module's attention and mask in transformers' registries."""
DELTA_RULE_NAMES = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
MAX_PACKING_GAP = 1e-4
_CHECKED_VOCABULARY = 512
TensorShape = tuple[int, ...]
ComputeLogits = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ScoredTokenDecoder(torch.nn.Module):
    """Decoder that returns the logits [1, N, vocabulary] only at the pack's `scored_indices_N`.

    It has the attributes of a GPT that Megatron's schedule, wrapper and checkpoints read.
    """

    model_type = ModelType.encoder_or_decoder
    pre_process = post_process = True
    share_embeddings_and_output_weights = False
    """False because the modules tie them themselves."""
    vp_stage = None

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        config: TransformerConfig,
        compute_logits: ComputeLogits | None,
    ) -> None:
        super().__init__()
        self.causal_lm, self.config = causal_lm, config
        self._compute_logits = compute_logits

    def set_input_tensor(self, _: object) -> None:
        """Ignore the input of an earlier stage: there is only one stage."""

    def forward(
        self, input_ids_1T: torch.Tensor, _ids: None, _mask: None, packed_seq_params: AttentionPlan
    ) -> torch.Tensor:
        return compute_scored_logits(
            self.causal_lm, input_ids_1T, packed_seq_params, self._compute_logits
        )

    def scale_gradients(self, scale: torch.Tensor) -> None:
        """Scale gradients that FSDP2 divides, as Megatron's wrapper scales its own."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.to_local().mul_(scale)  # type: ignore[attr-defined]

    def sharded_state_dict(
        self, prefix: str = "", metadata: Mapping[str, Any] | None = None, **_: Any
    ) -> dict[str, ShardedTensor]:
        """Return every parameter whole, as each data-parallel rank holds it."""
        rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        return {
            name: ShardedTensor.from_rank_offsets(name, parameter, replica_id=(0, 0, rank))
            for name, parameter in self.causal_lm.named_parameters()
        }


def compute_scored_logits(
    causal_lm: PreTrainedModel,
    input_ids_1T: torch.Tensor,
    plan: AttentionPlan,
    compute_logits: ComputeLogits | None = None,
) -> torch.Tensor:
    """Compute logits [1, N, vocabulary] at the pack's scored indices."""
    states_TH = causal_lm.model(
        input_ids_1T,
        position_ids=plan.positions_T[None],
        areal_layout=plan.layout,
        cu_seq_lens_q=plan.layout.query_starts,
        use_cache=False,
    ).last_hidden_state[0]
    states_NH = states_TH.index_select(0, plan.scored_indices_N)
    head = causal_lm.get_output_embeddings()
    if compute_logits is not None and getattr(head, "bias", None) is None:
        logits = compute_logits(states_NH, head.weight)
    else:
        logits = head(states_NH)
    if scaling := getattr(causal_lm.config, "logits_scaling", None):  # granite
        logits = logits / scaling
    if cap := getattr(causal_lm.config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits[None]


def build_decoder(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    recompute: bool = False,
    on_meta: bool = False,
) -> PreTrainedModel:
    """Build a network with uninitialized weights (`on_meta`: without memory) and true buffers."""
    hf_config = _parse_config(config)
    # Each parameter moves when it is registered; buffers, which no checkpoint has, are computed.
    hook = register_module_parameter_registration_hook(_move_to_meta) if on_meta else nullcontext()
    with no_init_weights(), device, hook:
        decoder = AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    decoder.tie_weights()  # `no_init_weights` omits it
    for name, buffer in decoder.named_buffers():
        # Rotary angles have arbitrary values if a module was only allocated.
        if "inv_freq" in name and not ((buffer >= 0) & (buffer <= 1)).all():
            raise AssertionError(f"the buffer {name} was not computed")
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(dtype)  # some families request float32 for some
    _split_delta_rule_by_row(decoder)
    if recompute:
        decoder.gradient_checkpointing_enable({"use_reentrant": False})
    return decoder.train()


def _move_to_meta(_module: object, _name: str, parameter: torch.nn.Parameter) -> Any:
    return torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)


def build_shapes(config: Mapping[str, Any]) -> PreTrainedModel:
    """Build a network without memory, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_parse_config(config))


@lru_cache(maxsize=4)
def check_packing(config_json: str, device: torch.device) -> None:
    """Compare a few layers with random weights, on a pack, with transformers' own, row by row.

    Raises:
        RecipeError: Rows affect one another, or attention differs from that of transformers.
    """
    hf_config = _cut_to_few_layers(_parse_config(json.loads(config_json)))
    packed = build_decoder(hf_config.to_dict(), torch.float32, device)
    with no_init_weights(), device:
        alone = AutoModelForCausalLM.from_config(
            hf_config, dtype=torch.float32, attn_implementation="eager"
        )
        alone.tie_weights()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter, other in zip(packed.parameters(), alone.parameters(), strict=True):
            values = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
            parameter.copy_(values / fan_in**0.5)
            other.copy_(parameter)
        lengths = torch.tensor([9, 1, 30, 17])
        ids_T = torch.randint(0, _CHECKED_VOCABULARY, (int(lengths.sum()),), generator=generator)
        rows = [part.to(device)[None] for part in ids_T.split(lengths.tolist())]
        expected = [alone(row, use_cache=False).logits[0] for row in rows]
        nothing = torch.empty(0, device=device)
        plan = AttentionPlan(
            layout=plan_varlen_attention(lengths.numpy(), cp=1, cp_rank=0, device=device),
            positions_T=torch.cat([torch.arange(int(n), device=device) for n in lengths]),
            cos_TD=nothing,
            sin_TD=nothing,
            scored_indices_N=torch.arange(len(ids_T), device=device),
        )
        (computed,) = compute_scored_logits(packed, torch.cat(rows, 1), plan)
    whole = torch.cat(expected)
    gap = ((computed - whole).abs().max() / whole.abs().max()).item()
    if not gap <= MAX_PACKING_GAP:
        raise RecipeError(
            f"{hf_config.model_type} cannot be trained: packed rows differ from rows alone by "
            f"{gap:.1g} of their largest value, at most {MAX_PACKING_GAP:g} is rounding",
            key="model",
            hint="its layers may look across rows in a way that is not known here",
        )


def _cut_to_few_layers(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Keep the first layers, up to one of each kind, and a small vocabulary."""
    kinds = list(getattr(hf_config, "layer_types", None) or ())
    layers = max([2, *(kinds.index(kind) + 1 for kind in kinds)])
    layers = max(layers, getattr(hf_config, "first_k_dense_replace", 0) + 1)
    cut = copy.deepcopy(hf_config)
    cut.num_hidden_layers = min(layers, hf_config.num_hidden_layers)
    if kinds:
        cut.layer_types = kinds[: cut.num_hidden_layers]
    cut.vocab_size = _CHECKED_VOCABULARY
    cut.bos_token_id = cut.eos_token_id = cut.pad_token_id = None
    return cut


def _parse_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    try:
        hf_config = AutoConfig.for_model(**config).get_text_config()
    except ValueError:
        hf_config = None
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(
            f"transformers knows no decoder of model_type {config.get('model_type')!r}",
            key="model",
            hint="choose a model of a type that it knows",
        )
    if "tie_word_embeddings" in config:  # beside the configuration of the text part
        hf_config.tie_word_embeddings = config["tie_word_embeddings"]
    return hf_config


def _split_delta_rule_by_row(decoder: PreTrainedModel) -> None:
    """Make the plain torch versions, which no package replaces, run row by row."""
    for module in decoder.modules():
        source = sys.modules[type(module).__module__]
        is_state_layer = hasattr(module, "in_proj_a") or hasattr(module, "in_proj_ba")
        if not is_state_layer or not hasattr(source, DELTA_RULE_NAMES[0]):
            continue
        rule, convolve = (getattr(source, name) for name in DELTA_RULE_NAMES)
        if getattr(rule, "keeps_to_rows", False):
            continue

        def chunk_gated_delta_rule(
            *states: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
            cu_seqlens: torch.Tensor | None = None, rule: Any = rule, **options: Any,
        ) -> Any:  # fmt: skip
            if cu_seqlens is None:
                return rule(*states, g=g, beta=beta, **options)
            rows = [
                rule(*(part[:, row] for part in states), g=g[:, row], beta=beta[:, row], **options)
                for row in _list_row_slices(cu_seqlens)
            ]
            return torch.cat([states for states, _ in rows], 1), None

        def causal_conv1d_fn(
            states: torch.Tensor, *weights: Any, cu_seq_lens_q: torch.Tensor | None = None,
            convolve: Any = convolve, **options: Any,
        ) -> Any:  # fmt: skip
            if cu_seq_lens_q is None:
                return convolve(states, *weights, **options)
            rows = [
                convolve(states[:, :, row], *weights, **options)
                for row in _list_row_slices(cu_seq_lens_q)
            ]
            return torch.cat(rows, 2)

        chunk_gated_delta_rule.keeps_to_rows = True  # type: ignore[attr-defined]
        setattr(source, DELTA_RULE_NAMES[0], chunk_gated_delta_rule)
        setattr(source, DELTA_RULE_NAMES[1], causal_conv1d_fn)


def _list_row_slices(starts: torch.Tensor) -> list[slice]:
    return [slice(first, last) for first, last in itertools.pairwise(starts.tolist())]


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    areal_layout: VarlenAttention,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend by transformers' interface: [1, heads, t, d] to [1, t, heads, d]."""
    query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))
    if areal_layout.key_indices is not None:  # under context parallelism
        group = parallel_state.get_context_parallel_group()
        key, value = (
            gather_from_sequence_parallel_region(part.contiguous(), group=group)
            for part in (key, value)
        )
    is_plain = softcap is None and s_aux is None
    if can_use_flash(query):  # FlashAttention has windows, and one size for queries and values
        is_plain &= query.shape[-1] == value.shape[-1]
    else:
        is_plain &= sliding_window is None
    if is_plain:
        return areal_layout.attend(query, key, value, scaling, sliding_window)[None], None
    segment = partial(
        _attend_segment, scale=scaling, window=sliding_window, cap=softcap, sinks_H=s_aux
    )
    return areal_layout.attend_by(segment, query, key, value)[None], None


def _attend_segment(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    cap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend [1, heads, q, d] over [1, kv_heads, k, d]; the last query sees all keys."""
    copies = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
    positions = torch.arange(key.shape[2], device=query.device)
    distance = positions[len(positions) - query.shape[2] :, None] - positions
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if cap is None and sinks_H is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = query @ key.transpose(-1, -2) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.reshape(1, -1, 1, 1).expand(1, -1, query.shape[2], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[2]] @ value


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *_, **__: None)


class TensorNames:
    """Names and shapes of a network's parameters in a checkpoint of the hub.

    Transformers 5 stacks the experts of a layer; most checkpoints have one tensor per expert. If a
    checkpoint also holds towers for images, the decoder's names have another prefix.
    """

    def __init__(self, config: Mapping[str, Any], files: StoredParameters) -> None:
        self._starts = [("model.", files.prefix), ("lm_head.weight", files.head)]
        self._decoder = build_shapes(config)
        tied = {"lm_head.weight"} if self._decoder.config.tie_word_embeddings else set()
        self._tensors = {
            name: tensor for name, tensor in self._decoder.state_dict().items() if name not in tied
        }
        self.trained = dict(self._decoder.named_parameters()).keys()
        self._loading = [
            conversion
            for conversion in get_model_conversion_mapping(self._decoder, add_legacy=False)
            if not isinstance(conversion, PrefixChange)
            and not (files.has_stacked_experts and "experts" in str(conversion.source_patterns))
        ]
        self._saving = [item.reverse_transform() for item in self._loading[::-1]]

    def list_tensors(self) -> Iterator[tuple[str, TensorShape, list[tuple[str, TensorShape]]]]:
        """Yield the name and shape of each parameter, and its names and shapes in a checkpoint."""
        for name, tensor in self._tensors.items():
            stored = self.to_stored(name, tensor)
            specs = [(key, tuple(part.shape)) for key, part in stored.items()]
            yield name, tuple(tensor.shape), specs

    def to_stored(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Convert a parameter to its tensors in a checkpoint."""
        stored = self._convert({name: tensor}, self._saving, is_reverse=True)
        return {_replace_start(key, self._starts): part for key, part in stored.items()}

    def from_stored(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Build the parameter that consists of these tensors of a checkpoint."""
        own_starts = [(stored, own) for own, stored in self._starts]
        renamed = {_replace_start(key, own_starts): part for key, part in stored.items()}
        (tensor,) = self._convert(renamed, self._loading, is_reverse=False).values()
        return tensor

    def _convert(
        self,
        tensors: Mapping[str, torch.Tensor],
        transforms: Sequence[WeightTransform],
        *,
        is_reverse: bool,
    ) -> dict[str, torch.Tensor]:
        """Convert tensors as transformers/core_model_loading.py converts a whole model."""
        renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        converters = [item for item in transforms if isinstance(item, WeightConverter)]
        converter_of = {pattern: item for item in converters for pattern in item.source_patterns}
        transform_of: dict[str, WeightTransform] = {}
        for key, tensor in sorted(tensors.items(), key=lambda item: dot_natural_key(item[0])):
            name, pattern = rename_source_key(key, renamings, converters, reverse=is_reverse)
            target = (
                WeightRenaming(key, name)
                if pattern is None
                else copy.deepcopy(converter_of[pattern])
            )
            transform_of.setdefault(name, target).add_tensor(name, key, pattern or key, tensor)
        converted = {}
        for name, transform in transform_of.items():
            for key, tensor in transform.convert(
                name, model=self._decoder, config=self._decoder.config
            ).items():
                converted[key] = tensor[0] if isinstance(tensor, list) else tensor
        return converted


def _replace_start(name: str, starts: Sequence[tuple[str, str]]) -> str:
    for old, new in starts:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@lru_cache(maxsize=4)
def read_tensor_names(config_json: str, files: StoredParameters | None) -> TensorNames:
    return TensorNames(json.loads(config_json), files or StoredParameters(0, 0))

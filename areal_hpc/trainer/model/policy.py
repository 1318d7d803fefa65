"""Construction of this rank's part of a Megatron GPT. No other module builds one."""

import json
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.sections.trainer import (
    KEEP_ALL_ACTIVATIONS,
    ActivationMemoryConfig,
    ParallelConfig,
)
from areal_hpc.trainer.batch.packing import PackParallelism
from areal_hpc.trainer.model.attention import RotaryPackedCausalAttention
from areal_hpc.trainer.model.elementwise import RMSNorm, swiglu
from areal_hpc.trainer.model.experts import GroupedExperts, use_stable_dispatch
from areal_hpc.trainer.model.families.architecture import (
    MEGATRON_MODEL_TYPES,
    Architecture,
    MoeConfig,
    divide_layers_over_stages,
    find_layout_problems,
    list_stage_layers,
)
from areal_hpc.trainer.model.families.lora import AdapterExport, add_adapter, get_base_name
from areal_hpc.trainer.model.families.weight_map import (
    OUTPUT_LAYER_NAME,
    ParamMap,
    compute_padded_vocab_size,
    list_parameter_maps,
)
from areal_hpc.trainer.model.logprobs import compute_float32_logits
from areal_hpc.trainer.model.router_replay import RouterReplay
from areal_hpc.trainer.model.sharding import shard_decoder
from areal_hpc.trainer.private_apis.megatron_private import (
    ScoredTokenCritic,
    ScoredTokenGPT,
    add_expert_biases,
    enable_norm_recompute,
)

TORCH_DTYPE_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GRADIENT_BUCKET_ELEMENTS = 40_000_000
"""Elements of gradients that are reduced over ranks at a time: 160 MB."""


@dataclass(slots=True, eq=False)
class Network:
    """This rank's part of a network, which is trained or only scored."""

    arch: Architecture
    gpt: Any
    """`ScoredTokenGPT` or `ScoredTokenCritic`, or `ScoredTokenDecoder` of transformers' modules."""
    dtype: torch.dtype
    device: torch.device
    """Device that computes."""
    split: PackParallelism
    rope_frequencies: torch.Tensor
    """Rotary angle per position [head_dim / 2]."""
    router_replay: RouterReplay | None = None
    """Set for the trained mixture; other networks choose experts themselves."""
    weight_map: list[ParamMap] = field(init=False)
    """Parameters of the network that a model directory stores."""
    adapter: AdapterExport = field(init=False)
    _held: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.weight_map = list_parameter_maps(self.arch)
        if self.arch.transformers_config:
            state = self.gpt.causal_lm.state_dict(keep_vars=True)
            self._held = {get_base_name(name): tensor for name, tensor in state.items()}
        else:
            self._held = {**dict(self.gpt.named_parameters()), **dict(self.gpt.named_buffers())}
        self.adapter = AdapterExport(self.arch, self._held.__getitem__)

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.gpt
        return module

    def get_local_part(self, parameter: ParamMap) -> torch.Tensor | None:
        """Return this rank's part of a parameter; None if only other ranks hold it."""
        stack = self.get_stack(parameter)
        if stack is None or parameter.expert is None:
            return stack
        group = parallel_state.get_expert_model_parallel_group()
        index = parameter.expert - group.rank() * self.experts_per_rank
        return stack[index] if 0 <= index < self.experts_per_rank else None

    def get_stack(self, parameter: ParamMap) -> torch.Tensor | None:
        """Return the same; for an expert's parameter, those of all the layer's local experts."""
        name = parameter.megatron
        if self.arch.transformers_config:
            return self._held[name]
        if parameter.expert is not None:
            name = f"mlp.experts.{name}"
        if parameter.layer is not None:
            first = self.gpt.decoder.layers[0].layer_number - 1
            name = f"decoder.layers.{parameter.layer - first}.{name}"
        return self._held.get(name)

    @property
    def experts_per_rank(self) -> int:
        """Number of each layer's experts on every expert-parallel rank; 0 in a dense network."""
        if self.arch.experts is None or self.arch.transformers_config:
            return 0
        ranks: int = parallel_state.get_expert_model_parallel_group().size()
        return self.arch.experts.count // ranks

    @property
    def tied_embedding_copy(self) -> torch.Tensor | None:
        if not self.arch.tied or self.gpt.pre_process:
            return None
        return self._held.get(OUTPUT_LAYER_NAME)


@dataclass(slots=True, eq=False, kw_only=True)
class TrainedNetwork(Network):
    """Network that is being trained."""

    ddp_module: DistributedDataParallel | None
    """Wrapper of `gpt` with the gradient buffers; None if FSDP2 divides the parameters."""
    offloads_activations: bool = False
    """Whether tensors for the backward pass are in host memory meanwhile."""

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.gpt if self.ddp_module is None else self.ddp_module
        return module


def build_policy(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    activations: ActivationMemoryConfig = KEEP_ALL_ACTIVATIONS,
) -> TrainedNetwork:
    """Build an uninitialized network on this rank; load weights into it before use.

    Process groups must exist (`process_groups.join_process_groups`).
    """
    network = build_network(arch, parallel, dtype, device, activations)
    if arch.experts is not None:
        network.router_replay = RouterReplay(arch, network.gpt)
    if not parallel.shard_parameters:
        return prepare_for_training(network, activations)
    shard_decoder(network.gpt, dtype, device)
    return TrainedNetwork(**_list_fields(network), ddp_module=None)


def prepare_for_training(network: Network, activations: ActivationMemoryConfig) -> TrainedNetwork:
    """Wrap the network in Megatron's data parallelism, with this rank's gradient buffers."""
    gpt, config = network.gpt, network.gpt.config
    for name, parameter in gpt.named_parameters():
        if ".experts." in name:
            # Megatron marks experts only when they are spread over ranks. If all layouts reduce and
            # optimize them separately, every layout can load their moments; and under sequence
            # parallelism each tensor-parallel rank processed other tokens.
            parameter.allreduce = False
    replica = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            bucket_size=GRADIENT_BUCKET_ELEMENTS,
        ),
        gpt,
    )
    # Until the last micro-batch gradients are only added up; then each bucket is reduced as soon as
    # the backward pass has completed it.
    config.no_sync_func = replica.no_sync
    return TrainedNetwork(
        **_list_fields(network), ddp_module=replica, offloads_activations=activations.offload
    )


def _list_fields(network: Network) -> dict[str, Any]:
    return {item.name: getattr(network, item.name) for item in fields(Network) if item.init}


def build_network(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    activations: ActivationMemoryConfig = KEEP_ALL_ACTIVATIONS,
    *,
    gives_values: bool = False,
) -> Network:
    """Build a network without gradients; with `gives_values` its head gives values, not tokens."""
    if problems := list(find_layout_problems(arch, parallel)):
        raise RecipeError.from_problems(problems)
    config = build_transformer_config(arch, parallel, dtype, device, activations)
    compute_logits = None if dtype == torch.float32 else compute_float32_logits
    split = PackParallelism(parallel.tp, parallel.cp, parallel_state.get_context_parallel_rank())
    if arch.transformers_config:
        # Importing transformers takes a second; networks of Megatron's layers do not need it.
        from areal_hpc.trainer.model.families import transformers_modules

        if gives_values:
            raise RecipeError(
                f"a critic cannot be a {arch.family}",
                key="trainer.objective.baseline",
                hint=f"use another baseline, or a critic of {', '.join(MEGATRON_MODEL_TYPES)}",
            )
        transformers_modules.check_packing(arch.transformers_config, device)
        causal_lm = transformers_modules.build_decoder(
            json.loads(arch.transformers_config),
            dtype,
            device,
            recompute=activations.recompute != "none",
            on_meta=parallel.shard_parameters,
        )
        if arch.lora is not None:
            add_adapter(causal_lm, arch.lora)
        return Network(
            arch=arch,
            gpt=transformers_modules.ScoredTokenDecoder(causal_lm, config, compute_logits),
            dtype=dtype,
            device=device,
            split=split,
            rope_frequencies=torch.empty(0, device=device),
        )
    options: dict[str, Any] = {
        "vocab_size": compute_padded_vocab_size(arch, parallel.tp),
        "max_sequence_length": 0,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        # RotaryPackedCausalAttention rotates queries and keys itself.
        "position_embedding_type": "none",
    }
    gpt: ScoredTokenGPT | ScoredTokenCritic
    if gives_values:
        gpt = ScoredTokenCritic(config, _build_block_spec(arch, config), **options)
    else:
        options["share_embeddings_and_output_weights"] = arch.tied
        options["compute_logits"] = compute_logits
        gpt = ScoredTokenGPT(config, _build_block_spec(arch, config), **options)
    gpt = gpt.to(device=device, dtype=dtype)
    if arch.experts is not None:
        use_stable_dispatch(gpt)
        if arch.experts.is_sigmoid:
            add_expert_biases(gpt)
    return Network(
        arch=arch,
        gpt=gpt,
        dtype=dtype,
        device=device,
        split=split,
        rope_frequencies=torch.tensor(
            arch.compute_rope_frequencies(), dtype=torch.float32, device=device
        ),
    )


def build_transformer_config(
    arch: Architecture,
    parallel: ParallelConfig,
    dtype: torch.dtype,
    device: torch.device,
    activations: ActivationMemoryConfig = KEEP_ALL_ACTIVATIONS,
) -> TransformerConfig:
    """Build Megatron's configuration, without fusions of Apex or Transformer Engine."""
    experts = None if arch.transformers_config else arch.experts
    mixture: dict[str, Any] = {}
    if experts is not None:
        mixture = {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn,
            # A softmax over the chosen experts equals one over all that is scaled to sum to 1.
            "moe_router_pre_softmax": not experts.norm_weights,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        }
    if experts is not None and experts.is_sigmoid:
        mixture |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_topk_scaling_factor": experts.scale,
            "moe_router_num_groups": experts.groups,
            "moe_router_group_topk": experts.chosen_groups if experts.groups > 1 else None,
        }
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        qk_layernorm=arch.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=1,
        sequence_parallel=parallel.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        # Weights are always loaded. Initialization still has to run: it marks parameters as divided
        # over tensor-parallel ranks, on which the gradient norm depends.
        init_method=_skip_weight_init,
        output_layer_init_method=_skip_weight_init,
        embedding_init_method=_skip_weight_init,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        # variable_seq_lengths refuses the default dispatcher even for dense networks.
        moe_token_dispatcher_type="alltoall",
        finalize_model_grads_func=_finalize_gradients,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        # Takes the activation from the layer spec, with or without Transformer Engine.
        use_te_activation_func=True,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **mixture,
        **_build_stage_options(arch, parallel),
        **_build_recompute_options(arch, parallel, activations),
    )


def _build_recompute_options(
    arch: Architecture, parallel: ParallelConfig, activations: ActivationMemoryConfig
) -> dict[str, Any]:
    if activations.recompute == "none":
        return {}
    if activations.recompute == "selective":
        enable_norm_recompute()
        # Not attention: FlashAttention recomputes its scores itself.
        modules = ["layernorm", "mlp"] if arch.experts is None else ["layernorm", "mlp", "moe"]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    layers = max(divide_layers_over_stages(arch.layers, parallel.pp))
    recomputed = activations.count_recomputed_layers(layers)
    return {
        "recompute_granularity": "full",
        # One layer at a time: each keeps its input, and only one has its activations.
        "recompute_method": "uniform" if recomputed == layers else "block",
        "recompute_num_layers": 1 if recomputed == layers else recomputed,
    }


def _finalize_gradients(
    chunks: list[Any], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Reduce gradients over ranks and divide them by the number of all scored tokens. A collective.

    Megatron's own reads the number of tokens from the device to compare it with 0.
    """
    if isinstance(chunks[0], DistributedDataParallel):  # FSDP2 has reduced them
        finalize_model_grads(chunks, None, **options)
    if num_tokens is None:
        return
    stages = parallel_state.get_pipeline_model_parallel_group()
    last = dist.get_global_rank(stages, stages.size() - 1)
    dist.broadcast(num_tokens, src=last, group=stages)
    dist.all_reduce(
        num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    scale = 1.0 / num_tokens.clamp(min=1)  # without tokens there are no gradients
    for chunk in chunks:
        chunk.scale_gradients(scale)


def _build_stage_options(arch: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    if arch.layers % parallel.pp == 0:
        return {}
    stages = [
        ["decoder"] * layers for layers in divide_layers_over_stages(arch.layers, parallel.pp)
    ]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {"pipeline_model_parallel_layout": stages}


def _skip_weight_init(weights: torch.Tensor) -> torch.Tensor:
    return weights


def _build_block_spec(arch: Architecture, config: TransformerConfig) -> TransformerBlockSubmodules:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    layers = list_stage_layers(arch.layers, config.pipeline_model_parallel_size, stage)
    specs = [_build_layer_spec(config, arch.get_experts(layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _build_layer_spec(config: TransformerConfig, experts: MoeConfig | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
        num_experts=None if experts is None else experts.count,
        moe_grouped_gemm=False,
    )
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = RotaryPackedCausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    mlp = spec.submodules.mlp.submodules
    if experts is None:
        mlp.activation_func = swiglu
    else:
        mlp.experts = GroupedExperts
        mlp.shared_experts.submodules.activation_func = swiglu
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    return spec

"""Small random models of every supported family, as transformers builds them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 331,  # odd: tensor parallelism has to pad it
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


HEADS_16 = {"head_dim": 16, "tie_word_embeddings": False}
STATE_LAYERS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
"""The gated delta rule, and one layer of attention."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
TRANSFORMERS_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {**HEADS_16, "sliding_window": 8}),
    "granite": (
        "GraniteConfig",
        {
            "logits_scaling": 8.0,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.22,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", WINDOWS),
    "gemma3": (
        "Gemma3TextConfig",
        {**WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **SHARED_EXPERTS,
            "num_key_value_heads": 4,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "routed_scaling_factor": 1.5,
            "rope_parameters": DEEPSEEK_ROPE,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **HEADS_16,
            **WINDOWS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**STATE_LAYERS, **EXPERTS, "shared_expert_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", STATE_LAYERS),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**STATE_LAYERS, **EXPERTS, "shared_expert_intermediate_size": 24},
    ),
}
"""Networks of transformers' own modules: the configuration's class and its arguments."""


ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 LoRA": ("qwen3", {}),
    "qwen3_5 DoRA": ("qwen3_5", {"dora": True}),
    "qwen3_moe rsLoRA": (
        "qwen3_moe",
        {
            "rslora": True,
            "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
    ),
}
"""Networks with a frozen base: its family, and the keys of `trainer.lora` beside sizes."""


def hf_model(family: str, layers: int = SIZES["num_hidden_layers"]) -> Any:
    """Make a random model, the same on every rank and in every launch."""
    sizes = SIZES | {"num_hidden_layers": layers}
    config: dict[str, Callable[[], Any]] = {
        "qwen3": lambda: transformers.Qwen3Config(
            **sizes, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN_ROPE
        ),
        "qwen2": lambda: transformers.Qwen2Config(**sizes, tie_word_embeddings=False),
        "llama": lambda: transformers.LlamaConfig(
            **sizes, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **sizes,
            head_dim=16,
            tie_word_embeddings=False,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
        "glm4_moe": lambda: transformers.Glm4MoeConfig(
            **sizes | HEADS_16 | SHARED_EXPERTS,
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
            initializer_range=0.1,  # else biases make all tokens alike
        ),
    }
    if family in config:
        made = config[family]()
    else:
        kind, given = TRANSFORMERS_CONFIGS[family]
        made = getattr(transformers, kind)(**sizes | given, pad_token_id=0)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(made).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases that are not 1 and 0
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
            if name.endswith("mlp.gate.weight") and family != "glm4_moe":
                parameter.mul_(20)  # a router with clear preferences
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) * 0.1)
    return model


def by_checkpoint_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put tensors under the names of a checkpoint: transformers stacks experts in memory."""
    named = {}
    for name, tensor in tensors.items():
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked or ".lora_" in name or f"{prefix}.experts.gate_up_proj_bias" in tensors:
            named[name] = tensor
            continue
        for expert, own in enumerate(tensor):
            if kind == "down_proj":
                named[f"{prefix}.experts.{expert}.down_proj.weight"] = own
            else:
                gate, up = own.chunk(2)
                named[f"{prefix}.experts.{expert}.gate_proj.weight"] = gate
                named[f"{prefix}.experts.{expert}.up_proj.weight"] = up
    return named

"""Small random models of every supported family, as transformers builds them."""

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


def hf_model(family: str, layers: int = SIZES["num_hidden_layers"]) -> Any:
    """The same random model on every rank and in every launch."""
    sizes = SIZES | {"num_hidden_layers": layers}
    config = {
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
    }[family]()
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases that are not 1 and 0
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
            if name.endswith("mlp.gate.weight"):  # a router with clear preferences
                parameter.mul_(20)
    return model


def by_checkpoint_name(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names of a checkpoint: transformers stacks experts in memory."""
    named = {}
    for name, tensor in tensors.items():
        prefix, stacked, kind = name.partition(".experts.")
        if not stacked:
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

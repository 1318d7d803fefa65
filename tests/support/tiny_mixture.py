"""A tiny random mixture of experts with a tokenizer."""

import json
from pathlib import Path

import torch
import transformers

from areal_hpc.launch.tiny_model import make_tiny_model
from areal_hpc.wire.routes import MixtureShape
from tests.support.chatml import TRAINING_TEXT

MIXTURE = MixtureShape(layers=3, per_token=2, experts=8)


def make_tiny_mixture(folder: Path, seed: int = 4) -> None:
    """Write a qwen3_moe whose routers have strong opinions."""
    make_tiny_model(folder, TRAINING_TEXT * 20, seed=5)
    tiny = json.loads((folder / "config.json").read_bytes())
    ids = {key: tiny[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=MIXTURE.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, intermediate_size=96, moe_intermediate_size=32,
        num_experts=MIXTURE.experts, num_experts_per_tok=MIXTURE.per_token, norm_topk_prob=True,
        max_position_embeddings=1024, tie_word_embeddings=False, initializer_range=0.2, **ids,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)

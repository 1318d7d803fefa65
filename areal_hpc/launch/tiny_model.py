"""Tiny, randomly initialized Qwen3 with a tokenizer of its own, in Hugging Face format.

It is small enough to learn on two CPU cores, and has the architecture of the models that clusters
train. The module needs numpy, but neither torch nor transformers.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, TURN_START_TOKEN, TURN_END_TOKEN)
ROLE_HEADERS = ("system\n", "user\n", "assistant\n")
INITIALIZER_STD = 0.05
VOCABULARY_MULTIPLE = 64
"""Divisor of the vocabulary's size, so that tensor-parallel ranks can split it."""

TINY_MODEL_CONTEXT_TOKENS = 2048
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- else -%}{%- for part in content or [] -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- endif -%}
    {{- 'You can call these functions. One JSON schema a line:\\n<tools>\\n' -}}
    {%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
    {{- '</tools>\\nTo call one, write:\\n<tool_call>\\n' -}}
    {{- '{"name": <its name>, "arguments": <a JSON object>}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- elif not (tools and loop.first and message.role == 'system') -%}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- if not loop.first or message.content -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": ' + function.name | tojson + ', "arguments": ' -}}
            {%- if function.arguments is string -%}{{- function.arguments -}}
            {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with tools in the form that SGLang's `qwen25` parser reads."""


@dataclass(frozen=True, slots=True)
class TinySizes:
    """Sizes of a Qwen3; `model.tiny` of a recipe sets some of them."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 384
    vocab: int = 384


def make_tiny_model(
    out: Path,
    texts: Iterable[str],
    *,
    max_position_embeddings: int = TINY_MODEL_CONTEXT_TOKENS,
    seed: int = 1,
    tie_embeddings: bool = True,
    **sizes: int,
) -> None:
    """Write a model directory: float32 weights, tokenizer, configuration; `config.json` comes last.

    Args:
        out: Directory; created if missing.
        texts: Texts from which the tokenizer learns its merges.
        max_position_embeddings: Maximum length of a sequence.
        seed: Seed of the initial weights.
        tie_embeddings: Use the embedding as output layer too.
        **sizes: Fields of `TinySizes` that differ from its defaults. The tokenizer learns at most
            `vocab` tokens, including the 256 bytes and 3 special tokens.
    """
    tiny = TinySizes(**sizes)
    tokenizer = train_tokenizer(texts, tiny.vocab)
    ids = {
        "bos_token_id": tokenizer.token_to_id(PAD_TOKEN),
        "eos_token_id": tokenizer.token_to_id(TURN_END_TOKEN),
        "pad_token_id": tokenizer.token_to_id(PAD_TOKEN),
    }
    config = {
        **build_tiny_architecture_config(tiny),
        **ids,
        "vocab_size": tokenizer.get_vocab_size(),
        "initializer_range": INITIALIZER_STD,
        "max_position_embeddings": max_position_embeddings,
        "max_window_layers": tiny.layers,
        "tie_word_embeddings": tie_embeddings,
    }
    out.mkdir(parents=True, exist_ok=True)
    weights = init_weights(config, np.random.default_rng(seed))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "add_bos_token": False,
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END_TOKEN,
        "model_max_length": max_position_embeddings,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    contents = {"tokenizer_config": tokenizer_config, "generation_config": ids, "config": config}
    for name, content in contents.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def build_tiny_architecture_config(tiny_config: TinySizes) -> dict[str, Any]:
    """Build the part of `config.json` that describes the network."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": tiny_config.head_dim,
        "hidden_act": "silu",
        "hidden_size": tiny_config.hidden,
        "intermediate_size": tiny_config.ffn,
        "model_type": "qwen3",
        "num_attention_heads": tiny_config.heads,
        "num_hidden_layers": tiny_config.layers,
        "num_key_value_heads": tiny_config.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "torch_dtype": "float32",  # the name before transformers 5
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": tiny_config.vocab,
    }


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer that covers all 256 bytes and splits numbers into digits.

    Its size is a multiple of 64; reserved special tokens fill the free ids, so that every id that
    the model can sample has a token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Each text comes with all role names, because the chat template puts one before each message.
    samples = (sample for text in texts for sample in (text, *ROLE_HEADERS))
    tokenizer.train_from_iterator(samples, trainer)
    missing = -tokenizer.get_vocab_size() % VOCABULARY_MULTIPLE
    tokenizer.add_special_tokens(
        [AddedToken(f"<|reserved_{number}|>", special=True) for number in range(missing)]
    )
    return tokenizer


def init_weights(
    config: dict[str, Any], rng: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """Initialize normal matrices and unit norms, under the names of Hugging Face's Qwen3."""
    hidden, head_dim, ffn = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * head_dim
    kv_size = config["num_key_value_heads"] * head_dim
    layer_shapes = {
        "input_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, ffn),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    std = np.float32(INITIALIZER_STD)
    return {
        name: rng.standard_normal(shape, dtype=np.float32) * std
        if len(shape) == 2
        else np.ones(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }

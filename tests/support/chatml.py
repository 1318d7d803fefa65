"""A byte-level BPE tokenizer and a ChatML template, made on the spot."""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from areal_hpc.launch.tiny_model import TURN_END_TOKEN, make_tiny_model

CHATML = (
    "{%- if tools %}"
    "{{- '<|im_start|>system\n# Tools\n' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TRAINING_TEXT = [
    "hello world, the quick brown fox jumps over the lazy dog 0123456789",
    "system user assistant tool You are a careful agent. What is 3 + 4? Answer: 7",
]


def byte_level_tokenizer() -> Tokenizer:
    """About 340 tokens; every text has an encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL_TOKENS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT * 5, trainer)
    return tokenizer


REASONING_CHATML = CHATML.replace(
    "{{- '<|im_start|>assistant\n' }}",
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}",
)
"""Template with a switch for reasoning, as Qwen3's."""


def write_model_dir(folder: Path, *, vocab_size: int = 512, template: str = CHATML) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"chat_template": template, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    return folder


CONTEXT_TOKENS = 4096


def make_talking_model(model_dir: Path) -> None:
    """A random model that writes text, and ends it at every tenth token but never before the first.

    Clients take a reply that is empty, or that reaches its limit, for an error. So two numbers of
    the residual stream are left alone by the layers and are the same after every token but one; the
    output layer reads the first for the turn's end and the second for what is no text.
    """
    make_tiny_model(
        model_dir,
        TRAINING_TEXT * 20,
        seed=5,
        tie_embeddings=False,
        max_position_embeddings=CONTEXT_TOKENS,
    )
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    turn_end, before_replies = tokenizer.token_to_id(TURN_END_TOKEN), tokenizer.encode("\n").ids[0]
    words = [tokenizer.decode([token]).strip() for token in range(tokenizer.get_vocab_size())]
    no_text = [not (word.isascii() and word.isprintable() and word) for word in words]
    weights = load_file(model_dir / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[:2] = 0.0
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, :2] = 1.0
    embedding[before_replies, 0] = -0.5
    head[:, :2] = 1.0
    head[no_text, 1] = -20.0
    head[turn_end, :2] = 2.2, 1.0
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})

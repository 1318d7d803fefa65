"""A tiny random model whose replies are text that ends."""

from pathlib import Path

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from areal_hpc.launch.tiny_model import TURN_END_TOKEN, make_tiny_model
from tests.support.chatml import TRAINING_TEXT

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

"""AReaL's `areal.utils.hf_utils` (tokenizer loading)."""

from typing import Any


def load_hf_tokenizer(
    model_name_or_path: str, fast_tokenizer: bool = True, padding_side: str | None = None
) -> Any:
    """The tokenizer of a model directory; one without padding pads with its end token."""
    from transformers import AutoTokenizer  # takes seconds, and a login node may not have it

    options = {} if padding_side is None else {"padding_side": padding_side}
    tokenizer = AutoTokenizer.from_pretrained(
        model_name_or_path, use_fast=fast_tokenizer, **options
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

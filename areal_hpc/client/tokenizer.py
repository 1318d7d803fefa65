"""A tokenizer as a client is given it -> the template and the encoder that sessions use."""

import re
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from areal_hpc.errors import RecipeError
from areal_hpc.recipe.hub_cache import REPO_PATTERN, find_snapshot
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder

_SESSION_TOKENIZER_CACHE: WeakKeyDictionary[Any, tuple[ChatTemplate, TokenEncoder]] = (
    WeakKeyDictionary()
)
"""Copying a large vocabulary takes a quarter of a second, and clients are made per episode."""


def load_tokenizer(tokenizer: Any) -> tuple[ChatTemplate, TokenEncoder]:
    """The chat template and the encoder of a tokenizer.

    Args:
        tokenizer: A fast tokenizer of `transformers`, the directory of a model, or `owner/name` of
            one in the hub's cache.

    Raises:
        RecipeError: It has no chat template, is no fast tokenizer, or is not in the cache.
    """
    if isinstance(tokenizer, str | Path):
        folder = Path(tokenizer)
        if not folder.exists() and re.fullmatch(REPO_PATTERN, str(tokenizer)):
            folder = find_snapshot(str(tokenizer), "model", None, "tokenizer")
        return ChatTemplate.from_model_dir(folder), TokenEncoder.from_model_dir(folder)
    found = _SESSION_TOKENIZER_CACHE.get(tokenizer)
    if found is None:
        found = _SESSION_TOKENIZER_CACHE[tokenizer] = _convert_tokenizer(tokenizer)
    return found


def _convert_tokenizer(tokenizer: Any) -> tuple[ChatTemplate, TokenEncoder]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise RecipeError(
            f"expected a fast tokenizer or a model directory, got a {type(tokenizer).__name__}",
            hint="load it with transformers.AutoTokenizer.from_pretrained",
        )
    source = tokenizer.chat_template
    if isinstance(source, dict):
        source = source.get("default")
    if not source:
        raise RecipeError("the tokenizer has no chat template", hint="set its chat_template")
    special = {
        name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
    }
    # A copy: encoders switch off truncation and padding, which its owner may want.
    copy = Tokenizer.from_str(backend.to_str())
    return ChatTemplate(source, special), TokenEncoder(copy, len(tokenizer))

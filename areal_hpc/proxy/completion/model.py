"""The served model: template, tokenizer, context length, parsers."""

from __future__ import annotations

from pathlib import Path

import msgspec

from areal_hpc.errors import RecipeError
from areal_hpc.proxy.engine.model_call import ServedModel
from areal_hpc.proxy.engine.tool_parsers import ToolParsers
from areal_hpc.session.chat_template import ChatTemplate, TokenEncoder


def load_served_model(
    name: str,
    model_dir: Path,
    context_tokens: int | None,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
) -> ServedModel:
    """A model in Hugging Face format as it is served; its own context limit when None is given.

    Raises:
        RecipeError: The directory lacks a tokenizer, a chat template, or the limit.
    """
    return ServedModel(
        name,
        ChatTemplate.from_model_dir(model_dir),
        TokenEncoder.from_model_dir(model_dir),
        context_tokens or read_context_tokens(model_dir),
        tool_call_parser,
        reasoning_parser,
    )


def start_parsers(model: ServedModel, serve_python: str) -> ToolParsers | None:
    """SGLang's parsers for the model's formats, run by its interpreter; None if it has none."""
    if not (model.tool_call_parser or model.reasoning_parser):
        return None
    return ToolParsers(serve_python, model.tool_call_parser, model.reasoning_parser)


def read_context_tokens(model_path: Path) -> int:
    """The longest sequence that the model's configuration allows.

    Raises:
        RecipeError: The configuration does not say.
    """
    config = msgspec.json.decode((model_path / "config.json").read_bytes())
    limit = config.get("max_position_embeddings")
    if not isinstance(limit, int):
        raise RecipeError(
            f"{model_path / 'config.json'} does not say max_position_embeddings",
            key="inference.context_length",
            hint="set inference.context_length to the longest prompt plus reply",
        )
    return limit

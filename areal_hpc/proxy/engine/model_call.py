"""Model calls and replies in the form that all dialects are translated to, and the served model."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from areal_hpc.errors import RecipeError
from areal_hpc.proxy.engine.generation import SamplingParams
from areal_hpc.session.chat_template import (
    ChatTemplate,
    Message,
    TokenEncoder,
    read_json,
)
from areal_hpc.session.message_matching import MessageRewriter, normalize_chat_message
from areal_hpc.wire.trajectory import CallFacts, MixtureShape


class ToolChoice(msgspec.Struct, frozen=True):
    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    """Name of the tool that must be called."""
    parallel: bool = True
    allowed: tuple[str, ...] = ()
    """Names of the tools that may be called; empty for all."""
    follows_schemas: bool = False
    """Whether all arguments must match the schemas, as with strict tools or a required call."""

    @property
    def must_call(self) -> bool:
        return self.mode == "required"

    def select_allowed_tools(self, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """Return the tools that may be called. The prompt has all; a call of others stays text."""
        if not tools or self.mode == "none":
            return []
        allowed = self.allowed
        return [
            {**tool, "function": {**tool["function"], "strict": True}}
            if self.follows_schemas or self.must_call
            else tool
            for tool in tools
            if not allowed or tool["function"]["name"] in allowed
        ]


class ModelCall(msgspec.Struct, frozen=True):
    messages: list[Message]
    tools: Sequence[dict[str, Any]] | None
    template_variables: Mapping[str, Any] | None
    sampling: SamplingParams
    """Sampling parameters; `max_new_tokens` 0 stands for the session's default."""
    prompt_param_name: str = "messages"
    """Name of the dialect's parameter for the prompt."""
    raw_prompt: str | Sequence[int] | None = None
    """Prompt of text or token ids, without a chat template, in place of messages."""
    n: int = 1
    top_logprobs: int = 0
    tool_choice: ToolChoice = ToolChoice()
    ignored: Sequence[str] = ()
    dropped_tools: Sequence[str] = ()
    """Types of tools that are left out of the prompt: a provider's servers would run them."""
    prefill: str | None = None
    """Beginning of the reply, which the model continues."""
    is_retrievable: bool = True
    """Whether the client may retrieve the reply later."""
    facts: CallFacts = field(default_factory=CallFacts)
    """Facts that the request has; those of the reply are added when it is recorded."""

    @property
    def ignored_names(self) -> list[str]:
        return [*self.ignored, *[f"tools[{kind}]" for kind in self.dropped_tools]]


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    template: ChatTemplate
    encoder: TokenEncoder
    context_tokens: int
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    normalize: MessageRewriter | None = None
    """Function of the user that normalizes messages (`proxy.message_normalizer`)."""
    end_token_ids: Sequence[int] = ()
    """Tokens that end a reply, the end of the turn first; `min_new_tokens` forbids them."""
    model_dir: Path | None = None
    mixture: MixtureShape | None = None
    """Experts of the model, if those that tokens visit are recorded."""

    @classmethod
    def from_model_dir(
        cls,
        model_name: str,
        model_dir: Path,
        context_tokens: int | None,
        tool_call_parser: str | None,
        reasoning_parser: str | None,
    ) -> ServedModel:
        template = ChatTemplate.from_model_dir(model_dir)
        encoder = TokenEncoder.from_model_dir(model_dir)
        template.require_messages(with_tools=tool_call_parser is not None)
        return cls(
            model_name,
            template,
            encoder,
            context_tokens or require_max_position_embeddings(model_dir),
            tool_call_parser,
            reasoning_parser,
            end_token_ids=list_end_token_ids(model_dir, encoder),
            model_dir=model_dir,
        )

    def list_parseable_tools(self, call: ModelCall) -> list[dict[str, Any]] | None:
        """Return the tools whose calls the reply may contain; None if it can only be text."""
        tools = call.tool_choice.select_allowed_tools(call.tools)
        must_parse = call.raw_prompt is None and (self.reasoning_parser is not None or tools)
        return tools if must_parse else None


ADDITIONAL_END_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""Other tokens at which SGLang 0.5.23 ends a reply (`srt/utils/hf_transformers/common.py`)."""


def list_end_token_ids(model_dir: Path, encoder: TokenEncoder) -> list[int]:
    """Return the ids of the tokens at which SGLang ends a reply by default.

    The token that ends the model's turn comes first.
    """
    ids: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        ends = read_json(model_dir / name).get("eos_token_id")
        ids += ends if isinstance(ends, list) else [ends]
    end = read_json(model_dir / "tokenizer_config.json").get("eos_token")
    texts = (end.get("content") if isinstance(end, dict) else end, *ADDITIONAL_END_TOKENS)
    ids += (encoder.find_token_id(text) for text in texts if text)
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def require_max_position_embeddings(model_dir: Path) -> int:
    """Return the longest sequence that the model's configuration allows."""
    limit = read_json(model_dir / "config.json").get("max_position_embeddings")
    if not isinstance(limit, int):
        raise RecipeError(
            f"{model_dir / 'config.json'} has no max_position_embeddings",
            key="inference.context_length",
            hint="set inference.context_length to the longest prompt plus reply",
        )
    return limit


class ReplyToolCall(Struct):
    """Tool call, or a part of it in a stream: only the first part has an id and a name."""

    index: int
    name: str = ""
    arguments: str = ""
    """JSON as the model wrote it."""
    call_id: str = ""


class ReplyContent(Struct):
    """Parsed content of a reply, or of a part of it in a stream."""

    text: str = ""
    reasoning: str = ""
    calls: list[ReplyToolCall] = field(default_factory=list)

    def append(self, next_part: ReplyContent) -> None:
        """Append the next part. Calls that begin in it get their ids here."""
        self.text += next_part.text
        self.reasoning += next_part.reasoning
        for call in next_part.calls:
            if call.index >= len(self.calls):
                call.call_id = call.call_id or f"call_{secrets.token_hex(12)}"  # as OpenAI's
                self.calls.append(
                    ReplyToolCall(call.index, call.name, call.arguments, call.call_id)
                )
            else:
                whole = self.calls[call.index]
                whole.name = whole.name or call.name
                whole.arguments += call.arguments

    def build_assistant_message(self, prefill: str = "") -> Message:
        """Build the reply's message in normal form, which begins with the client's `prefill`."""
        return normalize_chat_message(
            {
                "role": "assistant",
                "content": prefill + self.text,
                "reasoning_content": self.reasoning or None,
                "tool_calls": [
                    format_tool_call(call.call_id, call.name, call.arguments) for call in self.calls
                ],
            }
        )


def format_tool_call(call_id: str | None, function_name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": function_name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


_generator = random.Random()
"""Generator of ids, which must differ, but are not secret as keys are. It reads the operating
system's randomness once a process, because each such read lets another thread run."""


def _seed() -> None:
    _generator.seed(os.urandom(32))


_seed()
os.register_at_fork(after_in_child=_seed)


def make_random_id(num_bytes: int) -> str:
    """Return `num_bytes` random bytes as hexadecimal digits; not for secrets."""
    return _generator.randbytes(num_bytes).hex()

"""Model call and its reply, independent of a dialect, and the model that is called."""

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
    """The one tool that must be called."""
    parallel: bool = True
    allowed: tuple[str, ...] = ()
    """The tools that may be called; all when there is none."""
    follows_schemas: bool = False
    """Arguments are as the schemas say, as they are of a tool that must be called or is strict."""

    @property
    def must_call(self) -> bool:
        return self.mode == "required"

    def select_allowed_tools(self, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """The tools that may be called; the model is shown all. A call of another stays text."""
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
    """`max_new_tokens` 0 means: as the session's defaults say."""
    prompt_param_name: str = "messages"
    """Parameter in which the dialect has the prompt."""
    raw_prompt: str | Sequence[int] | None = None
    """Text or token ids that the model reads as they are, in place of messages."""
    n: int = 1
    top_logprobs: int = 0
    tool_choice: ToolChoice = ToolChoice()
    ignored: Sequence[str] = ()
    dropped_tools: Sequence[str] = ()
    """Types of the tools that the model is not told of: a provider's servers would run them."""
    prefill: str | None = None
    """What the reply begins with; the model goes on from there."""
    is_retrievable: bool = True
    """The reply may be asked for again."""
    facts: CallFacts = field(default_factory=CallFacts)
    """Those that the request told, so far."""

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
    """The user's own normalizer (`proxy.message_normalizer`)."""
    end_token_ids: Sequence[int] = ()
    """Tokens that end a reply, the turn's own first; `min_new_tokens` forbids them."""
    model_dir: Path | None = None
    mixture: MixtureShape | None = None
    """Of a model that records the experts which tokens visit."""

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
        """Tools whose calls the reply may hold; None if it is text and nothing else."""
        tools = call.tool_choice.select_allowed_tools(call.tools)
        holds_more = call.raw_prompt is None and (self.reasoning_parser is not None or tools)
        return tools if holds_more else None


ADDITIONAL_END_TOKENS = ("<|eom_id|>", "<|content_model_end_sampling|>", "<|ifm|im_end|>")
"""What SGLang 0.5.23 takes for ends besides (`srt/utils/hf_transformers/common.py`)."""


def list_end_token_ids(model_dir: Path, encoder: TokenEncoder) -> list[int]:
    """Ids of the tokens that end a reply for SGLang where a request names none.

    The one that ends the model's turn comes first.
    """
    found: list[int | None] = []
    for name in ("generation_config.json", "config.json"):
        ends = read_json(model_dir / name).get("eos_token_id")
        found += ends if isinstance(ends, list) else [ends]
    end = read_json(model_dir / "tokenizer_config.json").get("eos_token")
    texts = (end.get("content") if isinstance(end, dict) else end, *ADDITIONAL_END_TOKENS)
    found += (encoder.find_token_id(text) for text in texts if text)
    return list(dict.fromkeys(one for one in found if one is not None))


def require_max_position_embeddings(model_dir: Path) -> int:
    """The longest sequence that the model's configuration allows."""
    limit = read_json(model_dir / "config.json").get("max_position_embeddings")
    if not isinstance(limit, int):
        raise RecipeError(
            f"{model_dir / 'config.json'} does not say max_position_embeddings",
            key="inference.context_length",
            hint="set inference.context_length to the longest prompt plus reply",
        )
    return limit


class ReplyToolCall(Struct):
    """A tool call, or the next part of one: then only the first part has id and name."""

    index: int
    name: str = ""
    arguments: str = ""
    """JSON as the model wrote it."""
    call_id: str = ""


class ReplyContent(Struct):
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
        """The reply in normal form, as a client sends it back, with what the client began it by."""
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
"""Ids must differ, and open nothing: keys do, which the operating system makes. It is asked once a
process, because each question lets another thread in."""


def _seed() -> None:
    _generator.seed(os.urandom(32))


_seed()
os.register_at_fork(after_in_child=_seed)


def make_random_id(num_bytes: int) -> str:
    """So many random bytes as hexadecimal digits; not secret."""
    return _generator.randbytes(num_bytes).hex()

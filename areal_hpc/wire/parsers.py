"""Messages between the proxy and the process that runs SGLang's tool and reasoning parsers.

The proxy writes requests to its standard input and reads one `ParserReply` for each, in any order,
from its standard output; none for a `GrammarCheckKill`. When the process is ready, it first writes
an empty `ParserReply`.
"""

from typing import Any

from msgspec import Struct, field


class ReplyParseContext(Struct, frozen=True):
    """Facts about a reply that its parser needs before the text."""

    tools: list[dict[str, Any]]
    """Function schemas offered to the model; empty when it may call none."""
    prompt_end: str
    """Last characters of the prompt: they show whether the reply begins inside reasoning."""


class ParseChunkRequest(Struct, tag="parse", frozen=True):
    """Request to parse the next piece of text of a reply."""

    call: int
    """Number of this request, which its `ParserReply` repeats."""
    reply: int
    """Number of the model's reply that the text belongs to."""
    text: str
    last: bool
    cut: bool = False
    """With the last text: the model did not end the reply itself, as at a limit of tokens."""
    opening: ReplyParseContext | None = None
    """Set with the first text."""


class ToolGrammarRequest(Struct, tag="constrain", frozen=True):
    """Request for the grammar that makes the model call tools as the agent requested."""

    call: int
    tools: list[dict[str, Any]]
    prompt_end: str
    required: bool
    """Whether the model must call a tool; otherwise it may."""
    name: str | None
    parallel: bool


class GrammarCheckRequest(Struct, tag="check", frozen=True):
    """Request to check that a grammar does not block the engine; else the reply has an `error`."""

    call: int
    kind: str
    """Sampling parameter that takes the grammar."""
    text: str
    cpu_s: int
    """Processor time, in seconds, that compiling the grammar may take."""


class GrammarCheckKill(Struct, tag="kill", frozen=True):
    """Notice that nothing waits any more for the check of this number."""

    call: int


ParserRequest = ParseChunkRequest | ToolGrammarRequest | GrammarCheckRequest | GrammarCheckKill


class ParsedToolCall(Struct):
    name: str
    arguments: str
    """JSON."""


class ParserReply(Struct, omit_defaults=True):
    """Parsed addition of a text to its reply, or a grammar."""

    call: int = -1
    text: str = ""
    reasoning: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    grammar: str = ""
    """Name of the sampling parameter that takes `grammar_value`; empty when there is none."""
    grammar_value: str = ""
    reasons_first: bool = False
    """Whether the model reasons before the grammar begins."""
    error: str = ""
    """Reason that the parser failed on this text, or does not support the request."""
    is_unknown: bool = False
    """Whether this process lacks the beginning of the reply: another one got it, or it expired."""

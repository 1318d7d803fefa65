"""Messages to the parser process.

The proxy writes requests to its standard input and reads one `ParserReply` for each, in any order,
from its standard output; none for a `GrammarCheckKill`. The first line it writes is an empty
`ParserReply`: it is ready.
"""

from typing import Any

from msgspec import Struct, field


class ReplyParseContext(Struct, frozen=True):
    """Facts about a reply that its parser needs first."""

    tools: list[dict[str, Any]]
    """Function schemas offered to the model; empty when it may call none."""
    prompt_end: str
    """The last characters of the prompt: they show whether the reply begins inside reasoning."""


class ParseChunkRequest(Struct, tag="parse", frozen=True):
    call: int
    reply: int
    """Numbers the reply to the client whose text this is."""
    text: str
    last: bool
    cut: bool = False
    """Of the last text: the model did not end the reply itself, as at a limit of tokens."""
    opening: ReplyParseContext | None = None
    """Comes with the first text."""


class ToolGrammarRequest(Struct, tag="constrain", frozen=True):
    """Which grammar makes the model call tools as asked?"""

    call: int
    tools: list[dict[str, Any]]
    prompt_end: str
    required: bool
    """It must call; otherwise it may."""
    name: str | None
    parallel: bool


class GrammarCheckRequest(Struct, tag="check", frozen=True):
    """Would this grammar hold up the engine? The `error` of the reply says why."""

    call: int
    kind: str
    """The sampling parameter that takes it."""
    text: str
    cpu_s: int
    """Seconds of a core after which it does."""


class GrammarCheckKill(Struct, tag="kill", frozen=True):
    """Nobody waits any more for the check that has this number."""

    call: int


ParserRequest = ParseChunkRequest | ToolGrammarRequest | GrammarCheckRequest | GrammarCheckKill


class ParsedToolCall(Struct):
    name: str
    arguments: str
    """JSON."""


class ParserReply(Struct, omit_defaults=True):
    """Addition of a text to its parsed reply, or a grammar."""

    call: int = -1
    text: str = ""
    reasoning: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    grammar: str = ""
    """Name of the sampling parameter that takes `grammar_value`; empty when there is none."""
    grammar_value: str = ""
    reasons_first: bool = False
    """The model reasons before the grammar begins."""
    error: str = ""
    """The parser failed on this text; what it cannot do is said here, too."""
    is_unknown: bool = False
    """What the reply began with is not known: another process was told, or it was forgotten."""

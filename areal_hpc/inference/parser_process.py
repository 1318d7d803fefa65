"""Process that runs SGLang's tool-call and reasoning parsers.

It runs in SGLang's environment, for a proxy that does not; `wire/parsers.py` has their messages.
The name of either parser may be empty. The parsers are SGLang's own; this module only decides which
text may be shown while a reply is generated, and keeps text that SGLang would drop:

- SGLang's streaming detectors lose text and drop calls that turn out to be malformed. So a
  streamed reply is shown up to where a call may begin; the rest is parsed as a whole at the end.
- A call that does not parse, or names an unknown tool, is returned as text.
- So is a call that a limit cut: some detectors would close it, with incomplete arguments.
"""

import os
import re
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec
from typing import Any

import msgspec

import areal_hpc.inference.cpu.sglang_cpu  # noqa: F401  # stand-ins for modules that need a GPU
from areal_hpc.inference.grammar_check import GrammarChecker
from areal_hpc.wire.parsers import (
    GrammarCheckKill,
    GrammarCheckRequest,
    ParseChunkRequest,
    ParsedToolCall,
    ParserReply,
    ParserRequest,
    ReplyParseContext,
    ToolGrammarRequest,
)

if "sglang" not in sys.modules and (_spec := find_spec("sglang")):
    # The package is not executed: it imports modules for the engine, which takes two seconds.
    sys.modules["sglang"] = module_from_spec(_spec)

# isort: split
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

MAX_OPEN_REPLIES = 4096
CALL_MARKER_ATTRIBUTES = ("bot_token", "tool_call_start_token")
"""Attributes of SGLang's detectors with the text that begins a call."""
CALL_END_ATTRIBUTES = (
    "eot_token",
    "function_end_token",
    "suffix",
    "tool_call_end",
    "tool_call_end_token",
    "tool_call_function_end_token",
)
"""Attributes of SGLang's detectors with the text that ends a call, or several calls."""
_MARK_PATTERN = re.compile("<[^<>]+>")
_LONE_SURROGATE_PATTERN = re.compile("[\ud800-\udfff]")


class ReplyParserFactory:
    """Factory of parsers for a model's formats of tool calls and of reasoning.

    Raises:
        ValueError: SGLang has no such parser.
    """

    def __init__(self, tool_parser: str, reasoning_parser: str) -> None:
        for name, known in (
            (tool_parser, FunctionCallParser.ToolCallParserEnum),
            (reasoning_parser, ReasoningParser.DetectorMap),
        ):
            if name and name not in known:
                raise ValueError(f"SGLang has no parser {name!r}; it has {', '.join(known)}")
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def build_call_parser(self, tools: Sequence[dict[str, Any]]) -> Any:
        if not self._tool_parser or not tools:
            return None
        return FunctionCallParser([Tool(**tool) for tool in tools], self._tool_parser)

    def build_reasoning_parser(self, prompt_end: str, may_call: bool) -> Any:
        """Build a new `ReasoningParser`; None without a reasoning format."""
        if not self._reasoning_parser:
            return None
        return ReasoningParser(
            self._reasoning_parser,
            stream_reasoning=True,
            force_reasoning=self._prompt_opens_reasoning(prompt_end),
            tool_call_parser_active=may_call,
        )

    def _prompt_opens_reasoning(self, prompt_end: str) -> bool | None:
        detector = ReasoningParser(self._reasoning_parser).detector
        start_index = prompt_end.rfind(detector.think_start_token)
        end_index = prompt_end.rfind(detector.think_end_token)
        return None if start_index == end_index == -1 else start_index > end_index

    def reasons_first(self, prompt_end: str) -> bool:
        """Return whether a grammar must wait for the end of the reasoning."""
        if not self._reasoning_parser:
            return False
        is_open = self._prompt_opens_reasoning(prompt_end)
        if is_open is not None:
            return is_open
        default = ReasoningParser(self._reasoning_parser).detector.reasoning_default
        return default in ("always", "thinking", "enable_thinking")

    def build_tool_grammar(self, request: ToolGrammarRequest) -> tuple[str, str]:
        """Build the (sampling parameter, value) that enforces the requested tool choice.

        Raises:
            ValueError: This format has no such grammar.
        """
        chosen = [
            tool
            for tool in request.tools
            if request.name is None or tool["function"]["name"] == request.name
        ]
        parser = self.build_call_parser(chosen)
        if parser is None:
            return "", ""
        if not request.parallel and _get_structure_info(parser) is not None:
            return "structural_tag", _build_single_call_grammar(parser, chosen, request.required)
        if not request.parallel and not request.required:
            raise ValueError(
                f"tool_choice=auto cannot limit format {self._tool_parser} to one call"
            )
        choice = "required" if request.required else "auto"
        constraint = parser.get_structure_constraint(choice, parallel_tool_calls=request.parallel)
        if constraint is None:
            if request.required:
                raise ValueError(
                    f"format {self._tool_parser} does not support tool_choice=required"
                )
            return "", ""
        kind, value = constraint
        if hasattr(value, "model_dump"):
            value = value.model_dump(by_alias=True)
        return kind, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _get_structure_info(parser: Any) -> Any:
    if not parser.detector.supports_structural_tag():
        return None
    try:
        get_info = parser.detector.structure_info()
        get_info("x")
    except NotImplementedError:
        return None
    return get_info


def _build_single_call_grammar(parser: Any, tools: Sequence[dict[str, Any]], required: bool) -> str:
    get_info = _get_structure_info(parser)
    tags = []
    for tool in tools:
        function = tool["function"]
        info = get_info(function["name"])
        schema = function.get("parameters") if function.get("strict") else None
        content = {"type": "json_schema", "json_schema": schema or {}}
        tags.append({"begin": info.begin, "content": content, "end": info.end})
    tag_format = {
        "type": "triggered_tags",
        "triggers": sorted({get_info(tool["function"]["name"]).trigger for tool in tools}),
        "tags": tags,
        "at_least_one": required,
        "stop_after_first": True,
    }
    return msgspec.json.encode({"type": "structural_tag", "format": tag_format}).decode()


class ReplyParser:
    """Parser of one reply while the model generates it."""

    def __init__(self, formats: ReplyParserFactory, parse_context: ReplyParseContext) -> None:
        self._formats = formats
        self._tools = parse_context.tools
        self._calls = formats.build_call_parser(parse_context.tools)
        self._reasoning = formats.build_reasoning_parser(
            parse_context.prompt_end, self._calls is not None
        )
        self._body = ""
        """Text outside the reasoning."""
        self._shown_chars = 0
        self._reasoned = False
        self._held_breaks = ""
        """Line breaks that belong to the reasoning only if more of it follows."""
        self._markers = _list_call_markers(self._calls) if self._calls is not None else []

    def feed(self, text: str, is_last: bool, is_cut: bool = False) -> ParserReply:
        """Add text; return the part of the reply that can now be shown, all after the last text.

        `is_cut`: a limit ended the last text, not the model. Text on which SGLang fails is shown as
        it is, and nothing is parsed from then on.
        """
        shown = ParserReply()
        try:
            shown.reasoning, body = self._split_off_reasoning(text, is_last)
        except Exception as error:  # boundary: SGLang's code, on any output of a model
            shown.error, body = repr(error), text
            self._calls = self._reasoning = None
        self._body += body
        try:
            shown.text, shown.calls = self._pop_reply(is_last, is_cut)
        except Exception as error:  # boundary: as above
            shown.error, shown.text = repr(error), self._pop_text_until(len(self._body))
            self._calls = self._reasoning = None
        return shown

    def _split_off_reasoning(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", text
        reasoning, body = _replace_none_by_empty(self._reasoning.parse_stream_chunk(text))
        if is_last:
            more_reasoning, more_body = _replace_none_by_empty(self._reasoning.parse_stream_end())
            reasoning, body = reasoning + more_reasoning, body + more_body
        return self._trim_line_breaks(reasoning, body)

    def _pop_reply(self, is_last: bool, is_cut: bool) -> tuple[str, list[ParsedToolCall]]:
        if is_last:
            body, cut_call = self._body, ""
            if is_cut and self._calls is not None and self._calls.has_tool_call(body):
                end = _find_last_call_end(self._calls, body)
                self._body, cut_call = body[:end], body[max(end, self._shown_chars) :]
            text, calls = self._pop_rest()
            return text + cut_call, calls
        if self._calls is None:
            return self._pop_text_until(len(self._body)), []
        if not self._markers or self._calls.has_tool_call(self._body):
            return "", []
        held_chars = _count_partial_marker_chars(self._body, self._markers)
        return self._pop_text_until(len(self._body) - held_chars), []

    def _trim_line_breaks(self, reasoning: str, body: str) -> tuple[str, str]:
        if not self._reasoned:
            reasoning = reasoning.lstrip("\n")
        reasoning = self._held_breaks + reasoning
        trimmed = reasoning.rstrip("\n")
        self._held_breaks = reasoning[len(trimmed) :]
        self._reasoned = self._reasoned or bool(trimmed)
        return trimmed, body if self._body else body.lstrip("\n")

    def _pop_text_until(self, end_index: int) -> str:
        start, self._shown_chars = self._shown_chars, max(end_index, self._shown_chars)
        return self._body[start:end_index]

    def _pop_rest(self) -> tuple[str, list[ParsedToolCall]]:
        if self._calls is None or not self._calls.has_tool_call(self._body):
            return self._pop_text_until(len(self._body)), []
        text, calls = _parse_calls(self._formats.build_call_parser(self._tools), self._body)
        if not calls:
            return self._pop_text_until(len(self._body)), []
        shown = self._body[: self._shown_chars]
        if text.startswith(shown):
            text = text[len(shown) :]
        elif shown.strip() == text.strip():  # SGLang strips what stands before a call
            text = ""
        return text + self._get_malformed_call_text(len(calls)), calls

    def _get_malformed_call_text(self, count: int) -> str:
        marker = next((text for text in self._markers if self._body.count(text) > count), None)
        if marker is None:
            return ""
        _, *pieces = self._body.split(marker)
        return "".join(
            marker + piece
            for piece in pieces
            if not _parse_calls(self._formats.build_call_parser(self._tools), marker + piece)[1]
        )


def _list_call_markers(parser: Any) -> list[str]:
    markers = {getattr(parser.detector, name, "") for name in CALL_MARKER_ATTRIBUTES}
    get_info = _get_structure_info(parser)
    if get_info is not None:
        markers.add(get_info("x").trigger)
    return sorted(markers - {"", None}, key=len, reverse=True)


def _find_last_call_end(parser: Any, body: str) -> int:
    """Return the index behind the last call's end; that of the body if the format marks no ends.

    Calls of such a format are literals, which do not parse before they are complete.
    """
    ends = {getattr(parser.detector, name, "") for name in CALL_END_ATTRIBUTES}
    get_info = _get_structure_info(parser)
    if get_info is not None:
        end = get_info("x").end
        ends.update(_MARK_PATTERN.findall(end)[:1] or [end])
    ends -= {"", None}
    indices = [body.rfind(end) + len(end) for end in ends if end in body]
    return max(indices, default=0 if ends else len(body))


def _count_partial_marker_chars(text: str, markers: Sequence[str]) -> int:
    return max(
        count
        for marker in markers
        for count in range(min(len(marker), len(text)) + 1)
        if text.endswith(marker[:count])
    )


def _replace_none_by_empty(texts: tuple[str | None, str | None]) -> tuple[str, str]:
    return texts[0] or "", texts[1] or ""


def _parse_calls(parser: Any, body: str) -> tuple[str, list[ParsedToolCall]]:
    text, items = parser.parse_non_stream(body)
    return text, [
        ParsedToolCall(item.name or "", _escape_lone_surrogates(item.parameters)) for item in items
    ]


def _escape_lone_surrogates(json_text: str) -> str:
    return _LONE_SURROGATE_PATTERN.sub(lambda half: f"\\u{ord(half[0]):04x}", json_text)


class ParseRequestHandler:
    """Handler of the proxy's requests, one after the other."""

    def __init__(self, formats: ReplyParserFactory) -> None:
        self._formats = formats
        self._replies: dict[int, ReplyParser] = {}

    def answer(self, request: ParseChunkRequest | ToolGrammarRequest) -> ParserReply:
        """Answer a request; a failure of SGLang becomes the reply's `error`."""
        try:
            if isinstance(request, ToolGrammarRequest):
                grammar, value = self._formats.build_tool_grammar(request)
                reasons_first = self._formats.reasons_first(request.prompt_end)
                reply = ParserReply(
                    grammar=grammar, grammar_value=value, reasons_first=reasons_first
                )
            else:
                reply = self._parse_chunk(request)
        except Exception as error:  # boundary: SGLang's code, on any request
            reply = ParserReply(error=f"{type(error).__name__}: {error}")
        reply.call = request.call
        return reply

    def _parse_chunk(self, request: ParseChunkRequest) -> ParserReply:
        if request.opening is not None:
            self._replies[request.reply] = ReplyParser(self._formats, request.opening)
            while len(self._replies) > MAX_OPEN_REPLIES:  # replies whose clients disconnected
                del self._replies[next(iter(self._replies))]
        reply = self._replies.get(request.reply)
        if reply is None:  # an earlier process had it
            return ParserReply(is_unknown=True)
        if request.last:
            del self._replies[request.reply]
        return reply.feed(request.text, request.last, request.cut)


def main() -> None:
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # SGLang's output goes to the log
    lock = threading.Lock()

    def send(reply: ParserReply) -> None:
        with lock:
            out.write(msgspec.json.encode(reply) + b"\n")

    handler = ParseRequestHandler(ReplyParserFactory(*sys.argv[1:3]))
    decoder: msgspec.json.Decoder[ParserRequest] = msgspec.json.Decoder(ParserRequest)
    grammars = GrammarChecker(sys.argv[3], send)
    send(ParserReply())
    for line in sys.stdin.buffer:
        request = decoder.decode(line)
        if isinstance(request, GrammarCheckRequest):
            grammars.begin(request)
        elif isinstance(request, GrammarCheckKill):
            grammars.kill(request.call)
        else:
            send(handler.answer(request))


if __name__ == "__main__":
    main()

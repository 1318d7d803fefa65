"""Program for SGLang's Python: results of its parsers on calls that were cut, as JSON.

It reads replies by the name of their format, and answers with all formats and, for each reply, with
its parsed whole, the prefixes of it that are calls, and those that lose text.
"""

import json
import sys
from typing import Any

from areal_hpc.inference.parser_process import ReplyParser, ReplyParserFactory
from areal_hpc.wire.parsers import ParserReply, ReplyParseContext

# isort: split
from sglang.srt.function_call.function_call_parser import FunctionCallParser

PROPERTIES = {"cmd": {"type": "string"}, "n": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]


def list_calls(reply: ParserReply) -> list[Any]:
    return [[call.name, json.loads(call.arguments)] for call in reply.calls]


def judge(name: str, text: str) -> dict[str, Any]:
    formats, context = ReplyParserFactory(name, ""), ReplyParseContext(TOOLS, "")

    def parse(part: str, is_cut: bool) -> ParserReply:
        return ReplyParser(formats, context).feed(part, True, is_cut)

    whole = list_calls(parse(text, False))
    changed, lost = [], []
    for end in range(1, len(text)):
        reply = parse(text[:end], True)
        if reply.calls and list_calls(reply) != whole:
            changed.append(end)
        if not reply.calls and reply.text != text[:end]:
            lost.append(end)
    twice = parse(text + text[: len(text) // 2], True)
    return {"whole": whole, "changed": changed, "lost": lost, "then_cut": list_calls(twice)}


def main() -> None:
    replies = json.load(sys.stdin)
    judged = {name: judge(name, text) for name, text in replies.items()}
    print(json.dumps([[*FunctionCallParser.ToolCallParserEnum], judged]))


if __name__ == "__main__":
    main()

"""Tool-call parser process shared by the clients of one event loop.

It starts with the first reply that has to be parsed, which then takes some seconds longer, and
ends with this process.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from areal_hpc.jobs.environment import interpreter_of
from areal_hpc.proxy.engine.tool_parsers import SGLangParsers

_shared: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str | None, str | None, str], SGLangParsers]
] = WeakKeyDictionary()


def shared_parsers(
    tool_call_parser: str | None, reasoning_parser: str | None, serve_python: str
) -> SGLangParsers | None:
    """The parsers of the running event loop; None if there is nothing to parse.

    Args:
        tool_call_parser: SGLang's name of the tool-call format.
        reasoning_parser: SGLang's name of the reasoning format.
        serve_python: Interpreter of SGLang's environment, or `auto`.
    """
    if not tool_call_parser and not reasoning_parser:
        return None
    of_loop = _shared.setdefault(asyncio.get_running_loop(), {})
    key = (tool_call_parser, reasoning_parser, serve_python)
    if key not in of_loop:
        python = interpreter_of("serve", serve_python)
        of_loop[key] = SGLangParsers(python, tool_call_parser, reasoning_parser)
    return of_loop[key]

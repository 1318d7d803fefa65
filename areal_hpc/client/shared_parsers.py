"""Tool-call parser process shared by the clients of one event loop.

It starts with the first reply that has to be parsed, which then takes some seconds longer, and
ends with this process.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from areal_hpc.jobs.environment import get_interpreter
from areal_hpc.proxy.engine.tool_parsers import ToolParsers

_shared: WeakKeyDictionary[
    asyncio.AbstractEventLoop, dict[tuple[str | None, str | None, str], ToolParsers]
] = WeakKeyDictionary()


def get_shared_parsers(
    tool_call_parser: str | None, reasoning_parser: str | None, serve_python: str
) -> ToolParsers | None:
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
        python = get_interpreter("serve", serve_python)
        of_loop[key] = ToolParsers(python, tool_call_parser, reasoning_parser)
    return of_loop[key]

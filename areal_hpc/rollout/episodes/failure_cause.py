"""Cause of a failed episode: a short text that failures of one kind in one line share."""

import re
from pathlib import Path

_RAISED_PATTERN = re.compile(r"the agent raised ([\w.]+)")
_FRAME_PATTERN = re.compile(r'File "([^"\n]+)", line (\d+)')
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}


def find_failure_cause(status: str, reason: str) -> str:
    """The exception and its deepest line outside of libraries; the status if nothing was raised.

    `reason` is one sentence, then the end of the traceback.
    """
    raised = _RAISED_PATTERN.search(reason)
    frames = [(Path(file), line) for file, line in _FRAME_PATTERN.findall(reason)]
    own = [frame for frame in frames if _LIBRARY_FOLDERS.isdisjoint(frame[0].parts)] or frames
    if raised is None:
        return status
    return f"{raised[1]} at {own[-1][0].name}:{own[-1][1]}" if own else raised[1]

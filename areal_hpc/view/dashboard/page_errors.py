"""What is shown in place of a page, or of a part of it, that a run's files do not yield."""

import logging
import sqlite3

from areal_hpc.errors import ArealError

log = logging.getLogger(__name__)

_logged: set[tuple[str, str]] = set()
"""Pages with their errors: a page that is open is asked for again and again."""


def explain_page_error(page: str, error: Exception) -> str:
    """The reason for the reader; the traceback of an error that nobody foresaw is logged, once.

    Args:
        page: Which one of which run, for the log.
        error: What ended the making of it.
    """
    if isinstance(error, ArealError):
        return str(error)
    if isinstance(error, OSError | sqlite3.Error):
        return f"cannot be read: {error}"
    kind = type(error).__name__
    told = f"{kind}: {error}"
    if (page, told) not in _logged:
        _logged.add((page, told))
        log.warning("%s cannot be shown", page, exc_info=error)
    return f"the run's files are damaged, or of another version of areal-hpc ({told})"

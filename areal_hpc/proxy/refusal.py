"""Why a request was not answered, as an HTTP status that tells the client whether to repeat it."""

from __future__ import annotations

from areal_hpc.errors import ArealError

RETRY_AFTER_S = 1
"""When a request that came at a busy moment (429) may be repeated."""


class RequestRefused(ArealError):
    """The request's fault (4xx) or the moment's (5xx). `key` names the parameter at fault."""

    def __init__(self, status: int, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, key=key, hint=hint)
        self.status = status

    @property
    def message(self) -> str:
        """One sentence, with the hint if there is one."""
        problem = self.problems[0]
        return f"{problem.message} ({problem.hint})" if problem.hint else problem.message

    @property
    def param(self) -> str | None:
        """The parameter at fault."""
        return self.problems[0].key or None

    def __reduce__(self) -> tuple[object, ...]:
        problem = self.problems[0]
        return (_rebuild, (self.status, problem.message, problem.key, problem.hint))


def _rebuild(status: int, message: str, key: str, hint: str) -> RequestRefused:
    return RequestRefused(status, message, key=key, hint=hint)

"""Why a request was not answered, as an HTTP status that tells the client whether to repeat it."""

from __future__ import annotations

from typing import ClassVar

from areal_hpc.errors import ArealError

RETRY_AFTER_S = 1
"""When a request that came at a busy moment (429) may be repeated."""


class RequestRefused(ArealError):
    """The request's fault (4xx) or the moment's (5xx). `key` names the parameter at fault."""

    code: ClassVar[str | None] = None
    """What OpenAI calls it, where clients act on that."""

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


class PromptTooLong(RequestRefused):
    """A prompt that leaves no room for a reply, in the words by which OpenAI's clients know it.

    They begin to compact their history then, or end the episode as one that ran out of context.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, context_tokens: int, key: str) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {context_tokens} tokens. However, your "
            f"messages resulted in {prompt_tokens} tokens. Please reduce the length of the "
            f"messages ({self.code}).",  # LangChain reads no code but this
            key=key,
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens

    def __reduce__(self) -> tuple[object, ...]:
        return (PromptTooLong, (self.prompt_tokens, self.context_tokens, self.param or ""))


def _rebuild(status: int, message: str, key: str, hint: str) -> RequestRefused:
    return RequestRefused(status, message, key=key, hint=hint)

"""Every exception that areal_hpc raises on purpose, but for one.

Those below `ArealError` are told to a person or to a peer; their exit codes tell Slurm whether
another attempt can help. The others are signals within a process, which nobody reports.
`UnfinishedEngineCallError` of `proxy/engine/generation.py` carries a partial generation, and stands
there.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, where, and the one next step that fixes it."""

    message: str
    """Problem in words, with the value expected and the value found."""
    key: str = ""
    """The configuration key or path at fault."""
    hint: str = ""
    """One imperative: what to try."""

    def __str__(self) -> str:
        lines = [self.message]
        if self.key:
            lines.append(f"  at: {self.key}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)


class ArealError(Exception):
    """Base of all errors raised on purpose. Survives pickling: submitit carries pickles."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(message, key, hint),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def from_problems(cls, problems: Iterable[Problem]) -> ArealError:
        """One error that reports every problem at once."""
        found = tuple(problems)
        error = cls(found[0].message, key=found[0].key, hint=found[0].hint)
        error.problems = found
        error.args = ("\n".join(str(problem) for problem in found),)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # An exception's own form calls `__init__` with the message alone.
        return (_make_without_init, (type(self), self.args), self.__dict__)


def _make_without_init(cls: type[ArealError], args: tuple[object, ...]) -> ArealError:
    return cls.__new__(cls, *args)


class RecipeError(ArealError):
    """The recipe, a path it names, or the command line must change. Such a job is not requeued."""

    exit_code = 78


class ClusterError(ArealError):
    """A node, a file system, a port or a peer let us down. Another attempt may succeed."""

    exit_code = 75


class IdleError(ClusterError):
    """There was nothing to do for too long: the job gives its nodes back until it is wanted."""

    exit_code = 79


class LostTrainerRankError(ClusterError):
    """Another rank of the trainer vanished. Its end is the cause; this rank's is not counted."""

    exit_code = 80


class SlurmNotFoundError(ClusterError):
    """There is no such command here, as within most containers."""


class SlurmTimeoutError(ClusterError):
    """A daemon of Slurm does not answer now. It may do so at the next try."""


class SlurmCommandError(ClusterError):
    """A daemon of Slurm answered, and refused."""


class NodeResourceShortageError(ClusterError):
    """What an episode needs, this node does not have now: a process, memory, space, a task's files.

    The episode is played again later, and its agent is not charged with it.
    """


class SandboxStartError(NodeResourceShortageError):
    """No sandbox starts on this node now, where some have not long ago: it is loaded."""


class WorkerStartError(NodeResourceShortageError):
    """No worker process starts on this node now."""


class HttpStatusError(ClusterError):
    """The peer answered, with a status that says no."""

    def __init__(self, status: int, url: str, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status, self.url, self.body = status, url, body

    @property
    def peer_message(self) -> str:
        """What the peer said, without the JSON around it."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(self.body)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        return self.body


class WeightSyncError(ArealError):
    """New weights did not reach a replica. The replica is fenced and gets a full resend."""

    exit_code = 75


class WeightStorageError(WeightSyncError):
    """The shared storage did not take the weights. No replica has been touched."""


class ShardError(ArealError):
    """Recorded data is damaged or is not what its index says."""

    exit_code = 65


class AgentError(ArealError):
    """The user's agent failed; `key` is the line of its code, `FILE:LINE`, where that is known.

    It ends an episode, which is tried again. Only when the agent does nothing but fail does it end
    the run.
    """

    def __init__(
        self, message: str, *, key: str = "", hint: str = "", kind: str = "", trace: str = ""
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        self.kind = kind
        """The name of the exception that the agent raised, or one word for what it did instead."""
        self.trace = trace
        """The end of the traceback; empty if nothing was raised."""

    @property
    def cause(self) -> str:
        """Text that is the same for failures of the same kind in the same line."""
        return f"{self.kind} at {self.problems[0].key}"


class WorkerLostError(AgentError):
    """A worker process died during a call or a question. Another one takes its place."""


class SandboxLostError(AgentError):
    """The sandbox is gone: it used more than it may, or what ran in it ended it."""


class JobFailedError(ArealError):
    """A job of the run failed. Carries the exit code of the process that decided it."""

    def __init__(self, message: str, *, key: str = "", hint: str = "", code: int = 70) -> None:
        super().__init__(message, key=key, hint=hint)
        self.code = code


class RunInterruptedError(ArealError):
    """The user asked for a stop; everything has stopped."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("the run was stopped")


class SupersededTrainerError(ArealError):
    """A newer start of the trainer owns the run: this one must go without a trace."""

    exit_code = 143


class NonFiniteGradientError(ArealError):
    """Gradients are not finite, and the run does not go on; the last checkpoint stands."""


class UntrainableBatchError(RecipeError):
    """A batch cannot be trained as the recipe says; the last checkpoint stands."""


class TeacherError(RecipeError):
    """A server cannot be the teacher, or not any more; the last checkpoint stands."""


class LedgerRequestError(ArealError):
    """The ledger refuses a request: it is wrong (400) or from a superseded trainer (409)."""

    def __init__(self, status: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ProxyRequestError(ArealError):
    """The proxy refuses a request, by its fault (4xx) or the moment's (5xx).

    `key` names the parameter at fault.
    """

    code: ClassVar[str | None] = None
    """OpenAI's name of the error, where clients act on it."""
    may_be_repeated: ClassVar[bool] = True
    """False where clients that repeat calls after an error of the server should not."""
    MAX_MESSAGE_CHARS: ClassVar[int] = 4000
    """It may quote the request, which may be as long as 32 MiB."""

    def __init__(self, status: int, message: str, *, key: str = "", hint: str = "") -> None:
        most = self.MAX_MESSAGE_CHARS
        super().__init__(message[:most], key=key[:most], hint=hint)
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


class RepeatedlyFailedCallError(ProxyRequestError):
    """A model call that engines failed at so often that it is taken to be at fault itself."""

    may_be_repeated = False

    def __init__(self, message: str) -> None:
        super().__init__(502, message)


class PromptTooLongError(ProxyRequestError):
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


class ControlCallRefusedError(ArealError):
    """The caller may not control this replica now."""


class ParserLostError(Exception):
    """The parser process died; another start may do better."""


class ParserStuckError(ParserLostError):
    """The parser process was ended, as it came to no end with this text."""


class OtherRankError(Exception):
    """Another rank failed and reports why."""


class StopRequestedError(Exception):
    """A stop was asked for during work that all ranks leave undone."""


class ClientDisconnectedError(Exception):
    """Nobody is left to answer."""


class InvalidRewardError(ValueError):
    """The reward is not a finite number, or there is no such interaction."""


class UnknownInteractionError(InvalidRewardError, KeyError):
    """The session has no interaction of this name."""

    __str__ = Exception.__str__  # KeyError would quote the sentence


class UntrainableCallError(ValueError):
    """A model call that could never be trained on: it was neither journaled nor applied."""


class ChatTemplateError(ValueError):
    """The model's chat template does not accept these messages."""


class InvalidArithmeticError(ValueError):
    """The text is more than numbers, parentheses and the four operators."""


def describe_exception(error: BaseException) -> str:
    """`ValueError: why` on one line, without notes; also of one that cannot say it."""
    parts = traceback.format_exception_only(error)  # of a SyntaxError its place comes first
    return " ".join(next(one for one in parts if not one.startswith(" ")).split())


def escape_surrogates(text: str) -> str:
    """A text that UTF-8 can hold: half of a surrogate pair, as in a cut emoji, is spelled out.

    What an agent raises may quote anything that a model said; messages and events are UTF-8.
    """
    return text.encode(errors="backslashreplace").decode()


def escape_controls(text: str) -> str:
    """A text without characters that control a terminal, line breaks apart: they are spelled out.

    Models say any, and what they say is part of messages, logs and names of tools.
    """
    if text.isprintable():
        return text
    return "".join(
        one
        if one.isprintable() or one == "\n"
        else " "
        if one == "\t"
        else one.encode("unicode_escape").decode()
        for one in text
    )


def escape_line(text: str) -> str:
    """A line as `escape_controls` gives it; what follows a break in it begins no line of its own.

    What an agent raises, or a model says, would else look like a line of ours.
    """
    return escape_controls(text).replace("\n", "\n      ")

"""Exceptions of the project, except for one.

Subclasses of `ArealError` are reported to a person or to a peer, and their exit codes tell Slurm
whether another attempt can help. The others are signals within a process and are not reported.
The exception is `UnfinishedEngineCallError`, which carries a partial generation and stands in
`proxy/engine/generation.py`.
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
    """Description of a fault: what is wrong, its place, and one step that may fix it."""

    message: str
    """Problem in words, with the value expected and the value found."""
    key: str = ""
    """Configuration key or path at fault."""
    hint: str = ""
    """Step to try, as an imperative."""

    def __str__(self) -> str:
        lines = [self.message]
        if self.key:
            lines.append(f"  at: {self.key}")
        if self.hint:
            lines.append(f"  try: {self.hint}")
        return "\n".join(lines)


class ArealError(Exception):
    """Base of all reported errors. It can be pickled, because submitit pickles errors."""

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        self.problems: tuple[Problem, ...] = (Problem(message, key, hint),)
        super().__init__(str(self.problems[0]))

    @classmethod
    def from_problems(cls, problems: Iterable[Problem]) -> ArealError:
        """Build one error that reports every problem."""
        all_problems = tuple(problems)
        first = all_problems[0]
        error = cls(first.message, key=first.key, hint=first.hint)
        error.problems = all_problems
        error.args = ("\n".join(str(problem) for problem in all_problems),)
        return error

    def __reduce__(self) -> tuple[object, ...]:
        # The default would call `__init__` with the message only.
        return (_make_without_init, (type(self), self.args), self.__dict__)


def _make_without_init(cls: type[ArealError], args: tuple[object, ...]) -> ArealError:
    return cls.__new__(cls, *args)


class RecipeError(ArealError):
    """Fault in the recipe, in one of its paths, or in the command line. The job is not requeued."""

    exit_code = 78


class ClusterError(ArealError):
    """Failure of a node, a file system, a port or a peer. Another attempt may succeed."""

    exit_code = 75


class IdleError(ClusterError):
    """Lack of work for too long: the job releases its nodes until there is work again."""

    exit_code = 79


class LostTrainerRankError(ClusterError):
    """Loss of another rank of the trainer. Only the end of that rank counts as a failure."""

    exit_code = 80


class SlurmNotFoundError(ClusterError):
    """Lack of a Slurm command on this machine, as within most containers."""


class SlurmTimeoutError(ClusterError):
    """Timeout of a Slurm daemon. It may answer at the next attempt."""


class SlurmCommandError(ClusterError):
    """Refusal by a Slurm daemon."""


class NodeResourceShortageError(ClusterError):
    """Lack, on this node, of a process, memory, space or task files that an episode needs.

    The episode is played again later, and does not count as a failure of its agent.
    """


class SandboxStartError(NodeResourceShortageError):
    """Failure to start a sandbox on a node that started some recently: the node is overloaded."""


class WorkerStartError(NodeResourceShortageError):
    """Failure to start a worker process on this node."""


class HttpStatusError(ClusterError):
    """Error status in a peer's HTTP response."""

    def __init__(self, status: int, url: str, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:500]}")
        self.status, self.url, self.body = status, url, body

    @property
    def peer_message(self) -> str:
        """Error message of the peer, without the JSON around it."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            error = json.loads(self.body)["error"]
            return str(error["message"] if isinstance(error, dict) else error)
        return self.body


class WeightSyncError(ArealError):
    """Failure to send new weights to a replica. The replica is fenced and gets a full resend."""

    exit_code = 75


class WeightStorageError(WeightSyncError):
    """Failure to write weights to the shared storage. All replicas are unchanged."""


class ShardError(ArealError):
    """Damage of recorded data, or a mismatch between data and index."""

    exit_code = 65


class AgentError(ArealError):
    """Failure of the user's agent; `key` is the line of its code, `FILE:LINE`, if known.

    It ends an episode, which is tried again. It ends the run only if all episodes fail.
    """

    def __init__(
        self, message: str, *, key: str = "", hint: str = "", kind: str = "", trace: str = ""
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        self.kind = kind
        """Name of the exception that the agent raised, or one word for another failure."""
        self.trace = trace
        """End of the traceback; empty if the agent raised nothing."""

    @property
    def cause(self) -> str:
        """Text that is equal for failures of the same kind in the same line."""
        return f"{self.kind} at {self.problems[0].key}"


class WorkerLostError(AgentError):
    """Death of a worker process during a request. Another process replaces it."""


class SandboxLostError(AgentError):
    """End of a sandbox: it exceeded a limit, or a program in it ended it."""


class JobFailedError(ArealError):
    """Failure of a job of the run; `code` is the exit code of the process that caused it."""

    def __init__(self, message: str, *, key: str = "", hint: str = "", code: int = 70) -> None:
        super().__init__(message, key=key, hint=hint)
        self.code = code


class RunInterruptedError(ArealError):
    """End of a run that the user stopped."""

    exit_code = 130

    def __init__(self) -> None:
        super().__init__("the run was stopped")


class SupersededTrainerError(ArealError):
    """End of a trainer that a newer start has replaced: it must write nothing more."""

    exit_code = 143


class NonFiniteGradientError(ArealError):
    """End of a run because of gradients that are not finite; the last checkpoint is kept."""


class UntrainableBatchError(RecipeError):
    """Batch that cannot be trained with this recipe; the last checkpoint is kept."""


class TeacherError(RecipeError):
    """Server that cannot be the teacher, or no longer; the last checkpoint is kept."""


class LedgerRequestError(ArealError):
    """Refusal by the ledger of an invalid request (400) or of a superseded trainer (409)."""

    def __init__(self, status: int, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class ProxyRequestError(ArealError):
    """Refusal by the proxy of an invalid request (4xx), or of any while it cannot serve it (5xx).

    `key` names the parameter at fault.
    """

    code: ClassVar[str | None] = None
    """OpenAI's code of the error, if clients act on it."""
    may_be_repeated: ClassVar[bool] = True
    """Whether clients should repeat the call after an error of the server."""
    MAX_MESSAGE_CHARS: ClassVar[int] = 4000
    """Limit for messages that quote the request, which may have 32 MiB."""

    def __init__(self, status: int, message: str, *, key: str = "", hint: str = "") -> None:
        limit = self.MAX_MESSAGE_CHARS
        super().__init__(message[:limit], key=key[:limit], hint=hint)
        self.status = status

    @property
    def message(self) -> str:
        """Sentence with the hint, if there is one."""
        problem = self.problems[0]
        return f"{problem.message} ({problem.hint})" if problem.hint else problem.message

    @property
    def param(self) -> str | None:
        """Parameter at fault."""
        return self.problems[0].key or None


class RepeatedlyFailedCallError(ProxyRequestError):
    """Model call at which engines failed so often that the call itself must be the cause."""

    may_be_repeated = False

    def __init__(self, message: str) -> None:
        super().__init__(502, message)


class PromptTooLongError(ProxyRequestError):
    """Prompt that leaves no room for a reply; the message is OpenAI's, which clients recognize.

    Clients then compact their history, or end the episode for lack of context.
    """

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, context_tokens: int, key: str) -> None:
        super().__init__(
            400,
            f"This model's maximum context length is {context_tokens} tokens. However, your "
            f"messages resulted in {prompt_tokens} tokens. Please reduce the length of the "
            f"messages ({self.code}).",  # LangChain finds the code only here
            key=key,
        )
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class ControlCallRefusedError(ArealError):
    """Refusal of a caller that may not control this replica now."""


class ParserLostError(Exception):
    """Death of the parser process; another start may succeed."""


class ParserStuckError(ParserLostError):
    """End of a parser process that was killed because it did not finish this text."""


class OtherRankError(Exception):
    """Failure that another rank reports."""


class StopRequestedError(Exception):
    """Stop request during work that all ranks abandon."""


class ClientDisconnectedError(Exception):
    """Disconnection of the client that waits for the response."""


class InvalidRewardError(ValueError):
    """Reward that is not a finite number, or whose interaction does not exist."""


class UnknownInteractionError(InvalidRewardError, KeyError):
    """Name of an interaction that the session does not have."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class UntrainableCallError(ValueError):
    """Model call that cannot be trained; it was neither journaled nor applied."""


class ChatTemplateError(ValueError):
    """Refusal of messages by the model's chat template."""


class InvalidArithmeticError(ValueError):
    """Text with other parts than numbers, parentheses and the four operators."""


def describe_exception(error: BaseException) -> str:
    """Return `ValueError: message` on one line, without notes; also if its `__str__` fails."""
    parts = traceback.format_exception_only(error)  # the location of a SyntaxError comes first
    return " ".join(next(part for part in parts if not part.startswith(" ")).split())


def escape_surrogates(text: str) -> str:
    """Escape lone surrogates, as in a cut emoji, so that UTF-8 can encode the text.

    An agent's error may quote any output of the model; messages and events are UTF-8.
    """
    return text.encode(errors="backslashreplace").decode()


def escape_controls(text: str) -> str:
    """Escape all characters that control a terminal, except for line breaks.

    Models may generate any, and their output is part of messages, logs and tool names.
    """
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char == "\n"
        else " "
        if char == "\t"
        else char.encode("unicode_escape").decode()
        for char in text
    )


def escape_line(text: str) -> str:
    """Escape a line like `escape_controls`, and indent the text behind line breaks in it.

    Otherwise text of an agent or a model would look like a line of this program.
    """
    return escape_controls(text).replace("\n", "\n      ")

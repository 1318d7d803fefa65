"""Record of a row: its episode and its model calls, as a shard holds them beside the tokens."""

from typing import Any, Literal

from msgspec import Struct

from areal_hpc.wire.agent_reward import Reward

PromptReuse = Literal["reused", "retokenized", "none"]
"""`none`: extends nothing; `retokenized`: extends an interaction whose end the template hides."""


class CallRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One model call of a row. Times are Unix seconds, 0 where they are not known."""

    id: str
    """The reply's."""
    parent_id: str | None = None
    """The reply after whose tokens its prompt goes on; None where a prompt begins anew."""
    followers: list[str] = []
    """The replies that pass their reward on to this one, by the run's rule of credit."""
    trained: bool = False
    """This row trains the reply. One that several rows share is trained in the first of them."""
    reward: Reward | None = None
    """Its own, as the agent gave it: nothing of it is passed back or on."""
    reuse: PromptReuse = "none"
    asked_at: float = 0.0
    first_token_at: float = 0.0
    """Known of streams alone."""
    answered_at: float = 0.0
    replica: int = -1
    """The one of the cell that said its end; -1 if a client in the agent recorded the call."""
    prompt_tokens: int = 0
    """Of the whole prompt: the reply begins at this token of the row."""
    reply_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, that the engine had computed before."""
    finish_reason: str = ""
    """`stop`, `length` or `abort`."""
    new_messages: int = 0
    """Messages that are new in its prompt; the reply follows them in the row's messages."""
    tools: str = ""
    """Hash of the schemas of the tools that it could call."""
    template_variables: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """SGLang's sampling parameters; those that are left out had SGLang's default."""


class RowRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The episode of a row, and the row's calls in the order of its tokens."""

    session_id: str = ""
    task_id: str = ""
    task_index: int = -1
    """Line of the task set: of the held-out one if the row has an `eval_step`."""
    cell: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    ignored: dict[str, int] = {}
    """How often the episode's requests asked for what has no effect, by the parameter's name."""
    calls: list[CallRecord] = []
    is_credited: bool = False
    """The rewards of its calls are what each earned: the agent's client has passed them back."""
    reward: float | None = None
    """Of the row, in double precision: its column has single."""
    unrewarded_replies: int = 0
    """Completed replies of its episode that no reward reaches: no row trains them."""
    auxiliary_reason: str = ""
    """Of an auxiliary conversation: why it is one."""
    cause: str = ""
    """Of a failed episode: the exception and its line, such as `KeyError at agent.py:31`."""
    error: str = ""
    """Of a failed episode: one sentence, then the end of the traceback if there is one."""

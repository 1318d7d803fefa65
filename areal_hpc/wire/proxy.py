"""Messages of drivers to the proxy of their cell.

Drivers show the proxy's bearer key. Admin routes take the run's admin key as well, session
routes the session's own key (Bearer or `x-api-key`). The agent needs only `base_url` and its
session key. Programs outside a run may open sessions of their own, end them and export them; those
routes and names are AReaL's (`areal/experimental/openai/proxy`).

| route              | key     | request             | reply               |
|--------------------|---------|---------------------|---------------------|
| /rl/start_session  | admin   | StartSessionRequest | StartSessionReply   |
| /rl/set_reward     | session | SetRewardRequest    | SetRewardReply      |
| /rl/record         | session with `records_calls` | RecordCallsRequest | RecordCallsReply |
| /rl/end_session    | session | Empty               | EndSessionReply     |
| /rl/offer_episode  | driver  | OfferEpisodeRequest        | OfferEpisodeReply          |
| /rl/await_session  | driver  | AwaitSessionEndRequest | AwaitSessionEndReply   |
| /rl/finish_ticket  | driver  | FinishTicketRequest | FinishTicketReply   |
| /rl/keep_failed    | driver  | KeepFailedSessionRequest   | KeepFailedSessionReply     |
| /rl/list_conversations | driver | ListConversationsRequest | ListConversationsReply |
| /rl/mark_auxiliary | driver  | MarkAuxiliaryRequest | MarkAuxiliaryReply |
| /rl/seal           | driver  | Empty               | SealTicketsReply           |
| /export_trajectories | admin | ExportRequest     | ExportReply         |
| /grant_capacity    | admin   | Empty               | MaxOpenSessionsReply          |
| /healthz (GET)     | none    |                     | ProxyHealth         |
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field

from areal_hpc.wire.agent_reward import Reward
from areal_hpc.wire.ledger import Int64, TicketRef
from areal_hpc.wire.trajectory import MAX_TEMPERATURE

MAX_CAUSE_CHARS = 500
MAX_ERROR_CHARS = 10_000
MAX_AUXILIARY_REASON_CHARS = 500
MAX_MASK_TOKENS_PER_POSITION = 4096
"""At one place: SGLang's own bound (`--sampling-mask-max-tokens`)."""


class SamplingDefaults(Struct, frozen=True):
    """Sampling parameters that apply where the agent's request is silent."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: float = 1.0
    top_k: Int64 = -1
    max_new_tokens: Int64 = 512


class ExportSettings(Struct, frozen=True):
    """Settings of the export of a session to training rows (`session.export`)."""

    style: Literal["concat", "individual"] = "concat"
    credit: Literal["tree", "chronological"] = "tree"
    drop_retry_orphans: bool = True
    is_credited: bool = False
    """Rewards are what each reply earned: the agent's client has passed them back."""


class SessionLimits(Struct, frozen=True):
    """Limits on the session's use of the model; 0 is no limit."""

    max_turns: Int64 = 0
    """Replies."""
    max_tokens: Int64 = 0
    """Sampled tokens of all replies."""


class StartSessionRequest(Struct, frozen=True):
    """Open a session for one episode; without `ref`, one that its opener exports."""

    task_id: str
    ref: TicketRef | None = None
    episode: Int64 = 0
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    seed: Int64 = 0
    export: ExportSettings = field(default_factory=ExportSettings)
    api_key: str = ""
    """The key the session shall have; a new one when empty. Not kept."""
    disposable: bool = False
    """Nobody exports it: kept in memory alone, and forgotten soon after it ends."""
    limits: SessionLimits = SessionLimits()
    records_calls: bool = False
    """The agent's own client generates (`/generate`) and records calls (`/rl/record`). Sessions of
    agents that may run what a model wrote go without: they could record what was never said."""
    task_index: Int64 = -1
    """Line of the task set; of the held-out one if `ref` is of an evaluation."""
    sampling_from: Literal["agent", "recipe"] = "agent"
    """Whose temperature, top_p and top_k hold: the agent's, `sampling` where its request is silent;
    or those of `sampling`, whatever it asks for."""
    rights: Literal["all", "calls"] | None = None
    """What `api_key` opens. `calls`: model calls alone; rewards, records and the end need the
    `control_key` of the reply, which an agent is not given. None is `calls` where the admin key
    opens the session, else `all`."""
    records_sampling_mask: bool = False
    """Record which tokens a reply could be sampled from, where its parameters leave some out."""


class EngineAddress(Struct, frozen=True):
    """A server that answers SGLang's `/generate`, and the key it wants."""

    url: str
    api_key: str = ""


class StartSessionReply(Struct, frozen=True, omit_defaults=True):
    session_id: str
    api_key: str
    control_key: str = ""
    """Opens rewards and the end of a session of rights `calls`; else empty: `api_key` does."""
    task: dict[str, Any] | None = None
    """In an online run: the task that the run would like to be tried."""


class OfferEpisodeRequest(Struct, frozen=True):
    """Let the next program that opens a session play this episode of a ticket."""

    session: StartSessionRequest
    task: dict[str, Any]
    wait_s: float = 10.0
    """Time that the request may be kept until a program comes."""


class OfferEpisodeReply(Struct, frozen=True):
    """The session that a program opened; None if nobody came."""

    session_id: str | None


class AwaitSessionEndRequest(Struct, frozen=True):
    session_id: str
    wait_s: float = 10.0


class AwaitSessionEndReply(Struct, frozen=True):
    """End of a session, if it has come, and all its rewards added up."""

    ended: bool
    reward: float | None = None


class SetRewardRequest(Struct, frozen=True):
    """The reward of one interaction; of the last one when no id is given."""

    reward: float | bool | Reward
    """A number, or `{"value": ..., "parts": {...}, "metrics": {...}, "note": "..."}`."""
    interaction_id: str | None = None


class SetRewardReply(Struct, frozen=True):
    interaction_id: str


class RecordCallsRequest(Struct, frozen=True):
    """Model calls that a client within the driver recorded, each after the one it extends."""

    interactions: list[Raw]
    """`session.tree.Interaction` in JSON."""


class RecordCallsReply(Struct, frozen=True):
    interaction_count: int


class EndSessionReply(Struct, frozen=True):
    """The session takes no more requests."""

    message: str
    interaction_count: int
    reward: float | None = None
    """All rewards added up; if they say what each reply earned, the last one."""
    replicas_serving: int = 1
    """Of the cell, now: while it is 0, an episode fails through no fault of its agent."""


class FinishTicketRequest(Struct, frozen=True):
    """All episodes of a ticket ended: their rows may be sealed together.

    Sessions of the ticket that are not named here (repeated episodes) are discarded, apart from
    those that are kept as failed. Rows of an evaluation ticket are sealed and settled with nobody.
    """

    ref: TicketRef
    session_ids: list[str]
    discard: bool = False
    """The ticket was filtered or dropped: all its sessions are discarded, none is named."""


class KeepFailedSessionRequest(Struct, frozen=True):
    """Keep an ended session whose episode failed, for people to read; its ticket goes on."""

    session_id: str
    cause: Annotated[str, Meta(max_length=MAX_CAUSE_CHARS)]
    """The same for failures of one kind in one line of the agent."""
    error: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]
    """One sentence, then the end of the traceback."""


class KeepFailedSessionReply(Struct, frozen=True):
    """False if the cell has kept as many of that cause as it keeps: the session is forgotten."""

    kept: bool


class ListConversationsRequest(Struct, frozen=True):
    session_id: str


class RecordedConversationSummary(Struct, frozen=True):
    """Beginning of a conversation: replies that all extend the same first one, and that one."""

    interaction_id: str
    """Of the first reply."""
    messages: list[dict[str, Any]]
    """Of the first request."""
    reply: dict[str, Any]
    """The first one."""
    tools: list[str]
    """Names of the tools that the first request offered."""
    replies: int
    """Of the whole conversation, its branches included."""


class ListConversationsReply(Struct, frozen=True):
    """The conversations of a session, in order of completion."""

    conversations: list[RecordedConversationSummary]


class MarkAuxiliaryRequest(Struct, frozen=True):
    """Leave conversations of an open session out of training; they are recorded all the same."""

    session_id: str
    reasons: dict[str, Annotated[str, Meta(min_length=1, max_length=MAX_AUXILIARY_REASON_CHARS)]]
    """Why, by the id of a conversation's first reply."""


class MarkAuxiliaryReply(Struct, frozen=True):
    """Number of conversations of the session that are auxiliary now."""

    conversations: int


class FinishTicketReply(Struct, frozen=True):
    rows: int


class ExportRequest(Struct, frozen=True):
    """Hand over a session's rows once it has ended, and forget it within minutes."""

    session_id: str
    discount: float = 1.0
    style: Literal["individual", "concat"] = "individual"
    drop_retry_orphans: bool = False
    credit: Literal["tree", "chronological"] = "tree"


class ExportedInteraction(Struct, frozen=True):
    """One row, under AReaL's names."""

    interaction_id: str
    reward: float | None
    tensor_dict: dict[str, list[Any]]
    """`session.export.build_areal_batch`, as nested lists."""


class ExportReply(Struct, frozen=True, omit_defaults=True):
    """Rows by the id of the interaction they end with."""

    interactions: dict[str, ExportedInteraction]
    ignored: dict[str, int] = {}
    """How often the session's requests asked for what has no effect, by the parameter's name."""
    auxiliary: dict[str, str] = {}
    """Why conversations are none of these rows, by the id of their first reply."""


class MaxOpenSessionsReply(Struct, frozen=True):
    capacity: int


class SealTicketsReply(Struct, frozen=True):
    tickets: int


class ProxyHealth(Struct, frozen=True):
    sessions: int
    requests_in_flight: int
    unsealed_tickets: int
    replicas_serving: int

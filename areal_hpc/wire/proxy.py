"""Messages that drivers and other programs exchange with the proxy of a cell.

Drivers send the proxy's bearer key. Admin routes accept the run's admin key as well, session
routes the session's own key (Bearer or `x-api-key`). An agent needs only `base_url` and its
session key. Programs outside a run may open, end and export sessions of their own; those routes
and names are AReaL's (`areal/experimental/openai/proxy`).

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
"""SGLang's own bound (`--sampling-mask-max-tokens`)."""


class SamplingDefaults(Struct, frozen=True):
    """Sampling parameters that apply where the agent's request sets none."""

    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] = 1.0
    top_p: float = 1.0
    top_k: Int64 = -1
    max_new_tokens: Int64 = 512


class ExportSettings(Struct, frozen=True):
    """Settings of the export of a session to training rows (`session.export`)."""

    style: Literal["concat", "individual"] = "concat"
    credit: Literal["tree", "agents", "chronological"] = "tree"
    drop_retry_orphans: bool = True
    is_credited: bool = False
    """Whether each reward is all that its reply earned: the agent's client passed rewards back."""


class SessionLimits(Struct, frozen=True):
    """Limits on the session's use of the model; 0 is no limit."""

    max_turns: Int64 = 0
    """Limit on replies."""
    max_tokens: Int64 = 0
    """Limit on sampled tokens of all replies."""


class StartSessionRequest(Struct, frozen=True):
    """Request for a session of one episode, or without `ref` for one that the caller exports."""

    task_id: str
    ref: TicketRef | None = None
    episode: Int64 = 0
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    seed: Int64 = 0
    export: ExportSettings = field(default_factory=ExportSettings)
    api_key: str = ""
    """Key to give the session; a new one if empty. It is not stored."""
    disposable: bool = False
    """Whether it is never exported: then it is in memory alone, and deleted soon after its end."""
    limits: SessionLimits = SessionLimits()
    records_calls: bool = False
    """Whether the agent's own client generates (`/generate`) and records calls (`/rl/record`). Not
    for agents that may run a model's programs: these could record calls that never happened."""
    task_index: Int64 = -1
    """Line of the task set; of the held-out one if `ref` is of an evaluation."""
    sampling_from: Literal["agent", "recipe"] = "agent"
    """Source of temperature, top_p and top_k: the agent's request, or `sampling` where it sets
    none; or always `sampling`."""
    rights: Literal["all", "calls"] | None = None
    """Rights of `api_key`. `calls`: model calls alone; rewards, records and the end need the
    `control_key` of the reply, which an agent does not get. None is `calls` if the admin key opens
    the session, else `all`."""
    records_sampling_mask: bool = False
    """Whether to record the tokens a reply could be sampled from, if its parameters exclude any."""
    is_personal: bool = False
    """Whether a person plays it (`areal-hpc start`). Without a ticket it is never trained, and it
    is sealed if it has a reward at its end."""


class EngineAddress(Struct, frozen=True):
    """Address of a server with SGLang's `/generate`, and the key it requires."""

    url: str
    api_key: str = ""


class StartSessionReply(Struct, frozen=True, omit_defaults=True):
    session_id: str
    api_key: str
    control_key: str = ""
    """Key for rewards and the end of a session of rights `calls`; else empty: `api_key` does."""
    task: dict[str, Any] | None = None
    """Task that the program shall play, in an online run."""


class OfferEpisodeRequest(Struct, frozen=True):
    """Request to let the next program that opens a session play this episode of a ticket."""

    session: StartSessionRequest
    task: dict[str, Any]
    wait_s: float = 10.0
    """Time for which the proxy may keep the request until a program opens a session."""


class OfferEpisodeReply(Struct, frozen=True):
    """Session that a program opened; None if none did."""

    session_id: str | None


class AwaitSessionEndRequest(Struct, frozen=True):
    session_id: str
    wait_s: float = 10.0


class AwaitSessionEndReply(Struct, frozen=True):
    """State of a session, and the sum of its rewards."""

    ended: bool
    reward: float | None = None


class SetRewardRequest(Struct, frozen=True):
    """Reward for one interaction, or without an id for the last one."""

    reward: float | bool | Reward
    """Number, or `{"value": ..., "parts": {...}, "metrics": {...}, "note": "..."}`."""
    interaction_id: str | None = None


class SetRewardReply(Struct, frozen=True):
    interaction_id: str


class RecordCallsRequest(Struct, frozen=True):
    """Model calls that a client in the driver recorded, each after the one it extends."""

    interactions: list[Raw]
    """`session.tree.Interaction` in JSON."""


class RecordCallsReply(Struct, frozen=True):
    interaction_count: int


class EndSessionReply(Struct, frozen=True):
    """Reply that the session accepts no more requests."""

    message: str
    interaction_count: int
    reward: float | None = None
    """Sum of all rewards; if each is all that its reply earned, the last one."""
    replicas_serving: int = 1
    """Replicas of the cell that serve now: while it is 0, a failure is no fault of the agent."""


class FinishTicketRequest(Struct, frozen=True):
    """Notice that all episodes of a ticket ended: their rows may be sealed together.

    Sessions of the ticket that are not named here (repeated episodes) are discarded, apart from
    those that are kept as failed. Rows of an evaluation ticket are sealed, but not settled.
    """

    ref: TicketRef
    session_ids: list[str]
    discard: bool = False
    """Whether the ticket was filtered or dropped: all its sessions are discarded, none is named."""


class KeepFailedSessionRequest(Struct, frozen=True):
    """Request to keep an ended session whose episode failed, for people to read."""

    session_id: str
    cause: Annotated[str, Meta(max_length=MAX_CAUSE_CHARS)]
    """Text that is equal for failures of one kind in one line of the agent."""
    error: Annotated[str, Meta(max_length=MAX_ERROR_CHARS)]
    """One sentence, then the end of the traceback."""


class KeepFailedSessionReply(Struct, frozen=True):
    """Whether the session is kept; not if the cell has kept its maximum for that cause."""

    kept: bool


class ListConversationsRequest(Struct, frozen=True):
    session_id: str


class RecordedConversationSummary(Struct, frozen=True):
    """Beginning of a conversation: a first reply, and all the replies that extend it."""

    interaction_id: str
    """Id of the first reply."""
    messages: list[dict[str, Any]]
    """Messages of the first request."""
    reply: dict[str, Any]
    """First reply."""
    tools: list[str]
    """Names of the tools that the first request offered."""
    replies: int
    """Number of replies of the whole conversation, its branches included."""


class ListConversationsReply(Struct, frozen=True):
    """Conversations of a session, in order of completion."""

    conversations: list[RecordedConversationSummary]


class MarkAuxiliaryRequest(Struct, frozen=True):
    """Request to leave conversations of an open session out of training; they stay recorded."""

    session_id: str
    reasons: dict[str, Annotated[str, Meta(min_length=1, max_length=MAX_AUXILIARY_REASON_CHARS)]]
    """Reasons by the id of a conversation's first reply."""


class MarkAuxiliaryReply(Struct, frozen=True):
    """Number of conversations of the session that are auxiliary now."""

    conversations: int


class FinishTicketReply(Struct, frozen=True):
    rows: int


class ExportRequest(Struct, frozen=True):
    """Request for the rows of an ended session, which the proxy then deletes within minutes."""

    session_id: str
    discount: float = 1.0
    style: Literal["individual", "concat"] = "individual"
    drop_retry_orphans: bool = False
    credit: Literal["tree", "agents", "chronological"] = "tree"


class ExportedInteraction(Struct, frozen=True):
    """One row, with AReaL's names."""

    interaction_id: str
    reward: float | None
    tensor_dict: dict[str, list[Any]]
    """`session.export.build_areal_batch`, as nested lists."""


class ExportReply(Struct, frozen=True, omit_defaults=True):
    """Rows by the id of the interaction they end with."""

    interactions: dict[str, ExportedInteraction]
    ignored: dict[str, int] = {}
    """Number of the session's requests that set a parameter without effect, by its name."""
    auxiliary: dict[str, str] = {}
    """Reasons for conversations that are left out, by the id of their first reply."""


class MaxOpenSessionsReply(Struct, frozen=True):
    capacity: int


class SealTicketsReply(Struct, frozen=True):
    tickets: int


class ProxyHealth(Struct, frozen=True):
    sessions: int
    requests_in_flight: int
    unsealed_tickets: int
    replicas_serving: int

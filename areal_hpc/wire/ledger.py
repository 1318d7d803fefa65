"""Messages that drivers, proxies and the trainer exchange with the ledger.

A restarted ledger grants no training tickets before the trainer has sent it a request.
All routes are POST with a JSON body over TLS, and require the ledger's bearer key.

| route        | request          | reply          | caller        |
|--------------|------------------|----------------|---------------|
| /lease       | LeaseRequest     | LeaseReply     | driver        |
| /settle      | SettleShardsRequest     | Acknowledged   | proxy         |
| /drop        | DropTicketRequest      | Acknowledged   | driver, proxy |
| /report_evaluation | EvaluationResultRequest | Acknowledged | driver        |
| /open_generation  | OpenTrainerGenerationRequest | Acknowledged   | trainer       |
| /batch       | BatchRequest     | BatchReply     | trainer       |
| /publish     | WeightsPublishedRequest   | Acknowledged   | trainer       |
| /evaluate    | EvaluateRequest  | EvaluateReply  | trainer       |
| /finish      | FinishRunRequest    | Acknowledged   | trainer       |
| /status      | Empty            | LedgerStatus   | anyone        |
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

TaskSplit = Literal["train", "valid"]
"""Task set of training tickets, or the sets of evaluation tickets."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""Number that a journal can hold. JSON allows wider ones."""
NO_VERSION = -1
"""Value in place of a weight version if no token was sampled."""
StaleGroupPolicy = Literal["train_with_correction", "drop"]
"""Handling of a settled ticket that is older than the bound when its batch is formed."""


class TicketRef(Struct, frozen=True):
    """Identity of one issue of a ticket. Within an `eval_step` each set has a range of ids."""

    ticket_id: Int64
    attempt: Int64
    eval_step: Int64 = -1
    """Step whose weights are evaluated; -1 for a training ticket."""


class TicketGrant(Struct, frozen=True):
    """Permission to run episodes of one task."""

    ref: TicketRef
    task_index: int
    """Line of `train.jsonl`, or of the file of an evaluation set."""
    seed: int
    n_episodes: int
    """Episodes to start; a training ticket keeps the first `rollout.n_samples` that end well."""


class LeaseRequest(Struct, frozen=True):
    """Heartbeat of a driver: the tickets it holds and has finished, and its free capacity."""

    cell: str
    capacity: int
    """Episodes the driver could start now; a training ticket takes `n_episodes` of them."""
    held: list[TicketRef] = field(default_factory=list)
    finished: list[TicketRef] = field(default_factory=list)
    """Tickets that are finished and recorded in this cell's journal, but not yet settled."""
    wait_s: float = 5.0
    """Time for which the ledger may keep the request until it can grant a ticket."""
    job_start: int = 0
    """Number of the start of the cell's job: Slurm may leave an older one alive on a node that
    it lost; 0 if starts are not counted."""
    splits: tuple[TaskSplit, ...] = ("train", "valid")
    ended_episodes: int = 0
    """Ended episodes of training tickets that are not finished."""
    slowest_episode_s: float = 0.0
    slots: int = 0
    """Episodes that the driver runs at most."""


class LeaseReply(Struct, frozen=True):
    """Grants of new tickets, and instructions of the ledger to the cell."""

    grants: list[TicketGrant] = field(default_factory=list)
    seal_now: bool = False
    """Whether the trainer waits for tickets that are finished but not sealed."""
    stop: bool = False
    """Whether the run is over."""
    over: list[TicketRef] = field(default_factory=list)
    """Finished tickets that the cell need not report again."""
    pause_s: float = 0.25
    """Time until a busy driver sends its next request, unless an event there comes first."""


class SealedTicket(Struct, frozen=True):
    """Ticket whose rows are in a sealed, indexed shard."""

    ref: TicketRef
    shard: str
    """File name in the run's shards directory."""
    rows: list[int]
    rewards: list[float]
    oldest_version: Int64
    """Packed version of the oldest weights that sampled one of its tokens, or `NO_VERSION`."""


class SettleShardsRequest(Struct, frozen=True):
    """Report of sealed shards; the ledger reads their tickets in the index. It may be repeated."""

    cell: str
    shards: list[str]
    """File names in the run's shards directory."""


class DropTicketRequest(Struct, frozen=True):
    """Report of a ticket that never settles: its agent or seal failed, or a filter refused it."""

    cell: str
    ref: TicketRef
    reason: str
    kind: Literal["failed", "filtered"] = "failed"
    rewards: list[float] = []
    """Rewards of the episodes of a `filtered` group."""
    cause: str = ""
    """Exception and line of the agent, equal for tickets that failed alike. Empty if a node lacked
    something."""


class EvaluationResultRequest(Struct, frozen=True):
    """Rewards of one evaluation ticket: one per sample, 0 for a sample that kept failing."""

    cell: str
    ref: TicketRef
    rewards: list[float]
    answers: list[str] = []
    """Final answer of each sample; empty if none has one."""


class OpenTrainerGenerationRequest(Struct, frozen=True):
    """Notice that a trainer took `generation` and resumes after `base_step` saved steps."""

    generation: int
    base_step: int
    evaluated_step: int = -1
    """Step whose evaluation goes on if it is under way. Any other evaluation is given up."""


class BatchRequest(Struct, frozen=True):
    """Request of the trainer for the batch that leads to version `step`."""

    generation: int
    step: int
    wait_s: float = 5.0


class IrregularTicketCounts(Struct, frozen=True):
    """Counts of tickets since the previous batch that are stale, or became no part of this one."""

    stale_trained: int = 0
    """Tickets of this batch with a token older than the bound."""
    stale_dropped: int = 0
    filtered: int = 0
    """Finished tickets that a filter refused."""
    failed: int = 0
    """Tickets that were dropped because their agent kept failing."""


class BatchManifest(Struct, frozen=True):
    """Tickets of one batch in arrival order. It is durable before the trainer receives it."""

    step: int
    """Version this batch leads to; batch 1 turns version 0 into version 1."""
    generation: int
    """Generation that first requested it."""
    tickets: list[SealedTicket]
    counts: IrregularTicketCounts = IrregularTicketCounts()


class BatchReply(Struct, frozen=True):
    """Batch, or the progress towards it."""

    manifest: BatchManifest | None = None
    settled: int = 0
    """Tickets settled so far towards this batch."""
    trouble: str = ""
    """Reason, in words for the user, that the batch cannot form: agents keep failing, or groups
    are never accepted."""
    idle_cell_s: float = 0.0
    """With a batch: sum of the seconds for which cells had no ticket since the previous batch."""


class WeightsPublishedRequest(Struct, frozen=True):
    """Notice that a replica serves the weights of `step`; failed ones are sent them again."""

    generation: int
    step: int


class EvaluateRequest(Struct, frozen=True):
    """Request to begin or look up the evaluation of the current weights on held-out tasks."""

    generation: int
    step: int
    sets: dict[str, int]
    """Number of tasks of each evaluation set to play: the first ones."""
    wait_s: float = 5.0


class EvaluateReply(Struct, frozen=True):
    """Progress or result of an evaluation."""

    done: int
    total: int
    """Tasks of all sets."""
    metrics: dict[str, float] | None = None
    """Results by their names in a row of metrics. Set when done == total."""
    trouble: str = ""
    """Reason, in words for the user, that the evaluation cannot succeed: all agents fail."""


class FinishRunRequest(Struct, frozen=True):
    """Notice that the trainer has saved its last step: cells may end."""

    generation: int


class Empty(Struct, frozen=True):
    """Request without arguments."""


class Acknowledged(Struct, frozen=True):
    """Reply that the request is carried out, durably where the route promises durability."""


class LedgerStatus(Struct, frozen=True):
    """Snapshot for progress displays."""

    generation: int = 0
    version_step: int = 0
    leased: int = 0
    finished: int = 0
    settled: int = 0
    """Settled tickets that are not yet in a batch."""
    trained: int = 0
    dropped: int = 0
    filtered: int = 0
    eval_done: int = 0
    eval_total: int = 0
    cells: int = 0
    formed_step: int = 0
    """Step that the newest batch leads to; more than `version_step` while it is trained."""
    episodes_done: int = 0
    """Ended episodes of the next batch."""
    episodes_wanted: int = 0
    slowest_episode_s: float = 0.0
    episode_slots: int = 0
    """Episodes that all cells run at most at present."""

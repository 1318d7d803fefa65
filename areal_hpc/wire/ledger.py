"""Messages of drivers, proxies and the trainer to the ledger.

A restarted ledger grants no training tickets before it has heard from the trainer.
All routes are POST with a JSON body over TLS, and want the ledger's bearer key.

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
"""The task set of training tickets, or those of evaluation tickets."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A number that a journal can hold. JSON knows wider ones."""
NO_VERSION = -1
"""In the place of a weight version where no token was sampled."""
StaleGroupPolicy = Literal["train_with_correction", "drop"]
"""Handling of a settled ticket that is older than the bound when its batch is formed."""


class TicketRef(Struct, frozen=True):
    """One issue of one ticket. Within an `eval_step` each set has a range of ticket ids."""

    ticket_id: Int64
    attempt: Int64
    eval_step: Int64 = -1
    """-1 for a training ticket, else the step whose weights are evaluated."""


class TicketGrant(Struct, frozen=True):
    """Permission to run episodes of one task."""

    ref: TicketRef
    task_index: int
    """Line of the task set: of `train.jsonl`, or of that of an evaluation set."""
    seed: int
    n_episodes: int
    """To start; of a training ticket the first `rollout.n_samples` that end well are kept."""


class LeaseRequest(Struct, frozen=True):
    """A driver's heartbeat: what it holds, what it finished, and how much it can still take."""

    cell: str
    capacity: int
    """Episodes the driver could start now; a training ticket takes `n_episodes` of them."""
    held: list[TicketRef] = field(default_factory=list)
    finished: list[TicketRef] = field(default_factory=list)
    """Finished here, recorded in this cell's journal, not yet settled."""
    wait_s: float = 5.0
    """The ledger may keep the request this long until something can be granted."""
    job_start: int = 0
    """Which start of its job the cell is in, as Slurm may leave an older one alive on a node that
    it lost; 0 where starts are not counted."""
    splits: tuple[TaskSplit, ...] = ("train", "valid")
    ended_episodes: int = 0
    """Episodes that are over, of training tickets that are not."""
    slowest_episode_s: float = 0.0


class LeaseReply(Struct, frozen=True):
    """New work, and what the ledger wants of the cell."""

    grants: list[TicketGrant] = field(default_factory=list)
    seal_now: bool = False
    """The trainer waits for tickets that are finished but not sealed."""
    stop: bool = False
    """The run is over."""
    over: list[TicketRef] = field(default_factory=list)
    """Finished tickets that the cell need not report again."""
    pause_s: float = 0.25
    """Time until a busy driver asks again, unless something happens there first."""


class SealedTicket(Struct, frozen=True):
    """A ticket whose rows lie in a sealed, indexed shard."""

    ref: TicketRef
    shard: str
    """File name in the run's shards directory."""
    rows: list[int]
    rewards: list[float]
    oldest_version: Int64
    """Packed version of the oldest weights that sampled one of its tokens, or `NO_VERSION`."""


class SettleShardsRequest(Struct, frozen=True):
    """Sealed shards, whose tickets the ledger reads in the index. Repeating it is harmless."""

    cell: str
    shards: list[str]
    """File names in the run's shards directory."""


class DropTicketRequest(Struct, frozen=True):
    """A ticket that will never settle: its agent or its seal failed, or its group was refused."""

    cell: str
    ref: TicketRef
    reason: str
    kind: Literal["failed", "filtered"] = "failed"
    rewards: list[float] = []
    """Of the episodes of a `filtered` group."""
    cause: str = ""
    """The same text for tickets that failed alike: the exception and the line of the agent. Empty
    if a node lacked something."""


class EvaluationResultRequest(Struct, frozen=True):
    """The rewards of one evaluation ticket: one per sample, 0 for one that kept failing."""

    cell: str
    ref: TicketRef
    rewards: list[float]
    answers: list[str] = []
    """What each sample answered; empty if none says."""


class OpenTrainerGenerationRequest(Struct, frozen=True):
    """A trainer took `generation` and resumes after `base_step` saved steps."""

    generation: int
    base_step: int
    evaluated_step: int = -1
    """An evaluation of this step that is under way goes on. Any other is given up."""


class BatchRequest(Struct, frozen=True):
    """The trainer asks for the batch that leads to version `step`."""

    generation: int
    step: int
    wait_s: float = 5.0


class IrregularTicketCounts(Struct, frozen=True):
    """Tickets, since the batch before, that did not simply become one of this batch."""

    stale_trained: int = 0
    """In this batch, with a token older than the bound."""
    stale_dropped: int = 0
    filtered: int = 0
    """Finished, and not accepted."""
    failed: int = 0
    """Dropped because their agent kept failing."""


class BatchManifest(Struct, frozen=True):
    """The tickets of one batch in arrival order: durable before it is handed out."""

    step: int
    """The version this batch leads to; batch 1 turns version 0 into version 1."""
    generation: int
    """The generation that first asked for it."""
    tickets: list[SealedTicket]
    counts: IrregularTicketCounts = IrregularTicketCounts()


class BatchReply(Struct, frozen=True):
    """The batch, or what it still waits for."""

    manifest: BatchManifest | None = None
    settled: int = 0
    """Tickets settled so far towards this batch."""
    trouble: str = ""
    """Why the batch cannot form (agents that keep failing, groups that are never accepted), in
    words for the user."""
    idle_cell_s: float = 0.0
    """With a batch: seconds for which cells had no ticket since the batch before, all added up."""


class WeightsPublishedRequest(Struct, frozen=True):
    """At least one replica serves the weights of `step`; those that failed are sent them again."""

    generation: int
    step: int


class EvaluateRequest(Struct, frozen=True):
    """Ask for (or look up) the evaluation of the current weights on held-out tasks."""

    generation: int
    step: int
    sets: dict[str, int]
    """Evaluation set -> how many of its tasks, the first ones."""
    wait_s: float = 5.0


class EvaluateReply(Struct, frozen=True):
    """Progress or result of an evaluation."""

    done: int
    total: int
    """Tasks of all sets."""
    metrics: dict[str, float] | None = None
    """By their names in a row of metrics. Set when done == total."""
    trouble: str = ""
    """Why the evaluation is in vain, in words for the user: agents do nothing but fail."""


class FinishRunRequest(Struct, frozen=True):
    """The trainer has saved its last step: cells may go."""

    generation: int


class Empty(Struct, frozen=True):
    """No arguments."""


class Acknowledged(Struct, frozen=True):
    """Done, durably where the route promises durability."""


class LedgerStatus(Struct, frozen=True):
    """A snapshot for progress displays."""

    generation: int = 0
    version_step: int = 0
    leased: int = 0
    finished: int = 0
    settled: int = 0
    """Settled and not yet in a batch."""
    trained: int = 0
    dropped: int = 0
    filtered: int = 0
    eval_done: int = 0
    eval_total: int = 0
    cells: int = 0
    formed_step: int = 0
    """The step that the newest batch leads to; more than `version_step` while it is trained."""
    episodes_done: int = 0
    """Episodes of the next batch that are over."""
    episodes_wanted: int = 0
    slowest_episode_s: float = 0.0

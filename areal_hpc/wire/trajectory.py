"""Trajectories: training rows of tokens, which the proxy records and the trainer reads.

Shape letters used in names across the package:

| letter | axis                                         |
|--------|----------------------------------------------|
| B      | trajectories (rows) of a batch               |
| G      | episodes of one ticket (samples of one task) |
| T      | tokens, flat                                 |
| S      | sequences in a packed micro-batch            |
| V      | vocabulary (the local shard under TP)        |

Routes of a mixture of experts are the ids of the experts that a token visited in each layer, as
SGLang returns them, with layers without experts. Ids are uint8, or uint16 if a layer has more than
255 experts; the largest value of the type stands where no expert was recorded.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from areal_hpc.wire.agent_reward import MAX_REWARD, Reward

RouteArray = npt.NDArray[np.unsignedinteger[Any]]
MAX_TEMPERATURE: float = 100
"""Limit above which every distribution is uniform to rounding."""
GREEDY_TEMPERATURE_BOUND: float = 1e-6
"""Limit below which SGLang takes the likeliest token and returns log-probabilities at 1."""
MAX_VOCAB_SIZE = 2**31
"""Limit of token ids, which are stored as 32-bit integers."""


class RowKind(IntEnum):
    """Purpose of a row. A batch holds training rows alone."""

    TRAIN = 0
    EVALUATION = 1
    """Row of a held-out task."""
    FAILED = 2
    """Row of an episode in which the agent failed."""
    AUXILIARY = 3
    """Row of a conversation that served an episode and is not trained."""
    PERSONAL = 4
    """Row of a session that a person played and judged, and that is of no ticket."""

    @property
    def label(self) -> str:
        return self.name.lower()


PromptReuse = Literal["reused", "retokenized", "none"]
"""`none`: extends nothing; `retokenized`: extends an interaction whose end the template hides."""


class CallFacts(Struct, kw_only=True):
    """Facts of a call that request, journal and row share. Times: Unix seconds, 0 if unknown."""

    is_retry: bool = False
    """Whether the client marked the request as a repetition of one that had no reply."""
    asked_at: float = 0.0
    first_token_at: float = 0.0
    """Time of a stream's first token; unknown for other replies."""
    answered_at: float = 0.0
    replica: int = -1
    """Replica of the cell that sampled the reply's end; -1 if a client in the agent recorded it."""
    cached_tokens: int = 0
    """Tokens of the prompt that the engine had in its cache."""
    agent_id: str = ""
    """Agent that asked, by the client's own id; empty if it names none."""
    parent_agent_id: str = ""
    """Agent that called this one; empty for the one without an id."""
    is_agent_separate: bool = False
    """Whether the client named the agent by a header or `metadata`. Other ids only label a call."""

    @property
    def separate_agent_id(self) -> str:
        """Agent whose conversations alone this call may continue; empty for all without one."""
        return self.agent_id if self.is_agent_separate else ""


class CallRecord(CallFacts, omit_defaults=True, kw_only=True):
    """Record of one model call of a row."""

    id: str
    """Id of the reply."""
    parent_id: str | None = None
    """Reply whose tokens the prompt continues; None if it continues none."""
    followers: list[str] = []
    """Replies that pass their reward back to this one, by the run's rule of credit."""
    trained: bool = False
    """Whether this row trains the reply. If several rows share it, the first of them trains it."""
    reward: Reward | None = None
    """The agent's own: `value`, `parts`, `metrics`, `note`, `answer`; nothing passed back."""
    reuse: PromptReuse = "none"
    prompt_tokens: int = 0
    """Tokens of the whole prompt: the reply begins at this token of the row."""
    reply_tokens: int = 0
    finish_reason: str = ""
    """`stop`, `length` or `abort`."""
    new_messages: int = 0
    """Number of new messages in its prompt; the reply follows them in the row's messages."""
    tools: str = ""
    """Hash of its tools in the shard: BLAKE2b, 8 bytes, of their sorted JSON."""
    template_variables: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """SGLang's sampling parameters; missing ones had SGLang's default. Above 1,000 bytes a grammar
    is its hash."""


class RowRecord(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Record of a row's episode, and of the row's calls in the order of its tokens."""

    session_id: str = ""
    task_id: str = ""
    task_index: int = -1
    """Line of the task set: of the held-out one if the row has an `eval_step`."""
    cell: str = ""
    started_at: float = 0.0
    ended_at: float = 0.0
    ignored: dict[str, int] = {}
    """Number of the episode's requests that set a parameter without effect, by its name."""
    calls: list[CallRecord] = []
    is_credited: bool = False
    """Whether each reward is all that its reply earned: the agent's client passed rewards back."""
    reward: float | None = None
    """Reward of the row in double precision; its column has single precision."""
    unrewarded_replies: int = 0
    """Completed replies of its episode that no reward reaches: no row trains them."""
    auxiliary_reason: str = ""
    """Reason that the conversation is auxiliary; empty if it is not."""
    cause: str = ""
    """Exception of a failed episode and its line, such as `KeyError at agent.py:31`."""
    error: str = ""
    """Error of a failed episode: one sentence, then the end of the traceback if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """Tokens that could be sampled at each position of a row, if the sampler excluded any.

    The log-probabilities at such positions are of the distribution over these tokens.
    """

    counts_T: npt.NDArray[np.uint16]
    """Number of such tokens; 0 where none were excluded, and at tokens that were not sampled."""
    ids: npt.NDArray[np.int32]
    """Token ids, position after position."""
    forbids_T: npt.NDArray[np.bool_] | None = None
    """Positions whose `ids` are the excluded tokens instead; None if there are none."""


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryRow:
    """One recorded row: a token sequence that the model read and partly sampled.

    All four arrays have length T. Prompt, tool and user tokens have `loss_mask` 0,
    `logprobs` 0 and `versions` -1; tokens the model sampled have `loss_mask` 1, the
    engine's log-probability under the sampling temperature, and the packed weight version
    (`WeightVersion.packed`) they were sampled from.
    """

    ticket_id: int
    """Position in the run's stream of tasks."""
    attempt: int
    """Number of the ticket's issue that produced this row; it grows when a ticket is re-issued."""
    episode: int
    """Index among the ticket's `n_samples` episodes, from 0."""
    row: int
    """Index among the episode's rows, from 0: an episode that forks its history has several."""
    input_ids_T: npt.NDArray[np.int32]
    loss_mask_T: npt.NDArray[np.uint8]
    logprobs_T: npt.NDArray[np.float32]
    versions_T: npt.NDArray[np.int64]
    reward: float
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by it."""
    kind: RowKind = RowKind.TRAIN
    eval_step: int = -1
    """Step whose weights were evaluated, if its task is a held-out one; else -1."""
    record: RowRecord = field(default_factory=RowRecord)
    meta: dict[str, Any] = field(default_factory=dict)
    """Free-form JSON: the messages."""
    tool_schemas: dict[str, Any] = field(default_factory=dict)
    """Schemas of the tools that its calls name, by their hash."""
    sampling_mask: SamplingMask | None = None
    """Mask; None if the whole vocabulary could be sampled everywhere, or none was recorded."""
    routes_TLK: RouteArray | None = None
    """Experts that each token visited in each layer; None if none were recorded."""

    def __post_init__(self) -> None:
        arrays = (self.input_ids_T, self.loss_mask_T, self.logprobs_T, self.versions_T)
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1:
            raise ValueError(f"the token arrays must have equal length, got {sorted(lengths)}")

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)


def find_row_defect(row: TrajectoryRow, vocab_size: int = MAX_VOCAB_SIZE) -> str | None:
    """Return the first defect that makes a row unfit for training, in words; None for a sound row.

    Writers refuse such a row and trainers leave it out: it would cause an index error or a gradient
    that is not finite, again after every restart.
    """
    ids_T, mask_T = row.input_ids_T, row.loss_mask_T
    numbers = (row.attempt, row.episode, row.row)
    if not all(0 <= number < 2**31 for number in numbers):
        return f"expected attempt, episode and row from 0 to 2**31 - 1, got {numbers}"
    low, high = int(ids_T.min(initial=0)), int(ids_T.max(initial=0))
    if low < 0 or high >= vocab_size:
        return f"expected token ids from 0 to {vocab_size - 1}, got {low if low < 0 else high}"
    if int(mask_T.max(initial=0)) > 1:
        return f"expected a loss mask of 0 and 1, got {int(mask_T.max())}"
    if not np.isfinite(row.logprobs_T).all():
        return "expected finite log-probabilities, got inf or nan"
    if (row.versions_T[mask_T == 1] < 0).any():
        return "expected a weight version for every sampled token, got a negative one"
    mask = row.sampling_mask
    if mask is not None and (defect := find_mask_defect(mask, ids_T, vocab_size)):
        return defect
    if row.routes_TLK is not None and len(row.routes_TLK) != len(ids_T):
        return f"expected routes of {len(ids_T)} tokens, got {len(row.routes_TLK)}"
    if not abs(row.reward) <= MAX_REWARD:
        return f"expected a finite 32-bit float as reward, got {row.reward}"
    if not 0 <= row.temperature <= MAX_TEMPERATURE:
        return f"expected a temperature from 0 to {MAX_TEMPERATURE:g}, got {row.temperature}"
    return None


def find_mask_defect(
    mask: SamplingMask, input_ids_T: npt.NDArray[np.int32], vocab_size: int = MAX_VOCAB_SIZE
) -> str | None:
    """Return the defect of the sampling mask of these tokens, in words; None for a sound one."""
    tokens, kept = len(input_ids_T), int(mask.counts_T.sum(dtype=np.int64))
    if (len(mask.counts_T), len(mask.ids)) != (tokens, kept):
        return (
            f"expected a sampling mask of {tokens} places and {kept} tokens, got "
            f"{len(mask.counts_T)} and {len(mask.ids)}"
        )
    low, high = int(mask.ids.min(initial=0)), int(mask.ids.max(initial=0))
    if low < 0 or high >= vocab_size:
        outlier = low if low < 0 else high
        return f"expected a sampling mask of token ids from 0 to {vocab_size - 1}, got {outlier}"
    positions = np.repeat(np.arange(tokens), mask.counts_T)
    has_sampled = np.zeros(tokens, np.bool_)
    has_sampled[positions[mask.ids == input_ids_T[positions]]] = True
    if not has_sampled[mask.counts_T > 0].all():
        return "expected every sampled token in its sampling mask"
    return None


class MixtureShape(Struct, frozen=True, array_like=True):
    """Layers of a network, experts that a token visits in each, and experts of each."""

    layers: int
    per_token: int
    experts: int

    def make_routes(self, tokens: int) -> RouteArray:
        """Return routes [tokens, layer, k] without a recorded expert."""
        dtype: np.dtype[Any] = np.dtype(np.uint8 if self.experts < 256 else np.uint16)
        return np.full((tokens, self.layers, self.per_token), np.iinfo(dtype).max, dtype)


class RecordedRoutes(Struct, frozen=True, array_like=True):
    """Routes of a sequence's tokens but the last one, which no forward pass has read yet."""

    mixture: MixtureShape
    packed: bytes

    def unpack(self) -> RouteArray:
        """Return routes [t, layer, k]; the last one is of the sequence's last token but one."""
        empty = self.mixture.make_routes(0)
        return np.frombuffer(self.packed, empty.dtype).reshape(-1, *empty.shape[1:])


def lay_out_routes(
    parts: Iterable[tuple[int, RouteArray | None]], tokens: int
) -> RouteArray | None:
    """Return routes [tokens, layer, k] with each part from its position on; None without a part."""
    present = [(first, part) for first, part in parts if part is not None]
    if not present:
        return None
    _, like = present[0]
    routes_TLK = np.full((tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)
    for first, part in present:
        routes_TLK[first : first + len(part)] = part
    return routes_TLK


def record_engine_routes(mixture: MixtureShape, ids: bytes, tokens: int) -> RecordedRoutes | None:
    """Return the routes from ids of one or two bytes; None if their number or an id is wrong."""
    count = tokens * mixture.layers * mixture.per_token
    if len(ids) not in (count, 2 * count):
        return None
    experts = np.frombuffer(ids, "u1" if len(ids) == count else "<u2")
    if int(experts.max(initial=0)) >= mixture.experts:
        return None
    dtype = mixture.make_routes(0).dtype
    return RecordedRoutes(mixture, experts.astype(dtype, copy=False).tobytes())


def read_mixture_shape(model_dir: Path) -> MixtureShape | None:
    """Read the mixture that a model directory describes; None for a dense model."""
    return parse_mixture_shape(json.loads((model_dir / "config.json").read_bytes()))


def parse_mixture_shape(config: Mapping[str, Any]) -> MixtureShape | None:
    """Return the mixture that a parsed `config.json` describes; None for a dense model."""
    text = config.get("text_config") or config
    counts = (text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    experts = next((int(count) for count in counts if count), 0)
    if not experts:
        return None
    return MixtureShape(int(text["num_hidden_layers"]), int(text["num_experts_per_tok"]), experts)

"""Export of a session's tree to training rows, in one of two styles.

`concat`: one row per leaf, the token sequence from the root to that leaf. A reply that several
leaves share is trained in the first of them and is context in the others, so that each sampled
token is trained once. A path whose replies were sampled at different temperatures gives one row
per temperature, because a row is trained at one.

`individual`: one row per interaction, in which only its own reply is trained.

The style decides only how replies are packed: both train the same replies, and every row has the
episode's reward, the sum of its replies' rewards. The trainer computes what each reply earns from
the row's record, which lists the followers of each (`session.credit`).

A reward for the whole episode trains all its completed replies. If rewards name replies, a reply is
trained if a reward of its own, or of an earlier or later reply in its conversation, reaches it.
Others may be context in a row, and the episode's record counts them. A reply whose client left
before its end is not trained. Auxiliary conversations are rows of a kind of their own, in no batch,
and take no part in credit. A failed session is kept whole, for people to read: a row per leaf.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from areal_hpc.session.call_records import build_call_records
from areal_hpc.session.credit import (
    Followers,
    InteractionReward,
    compute_credited_rewards,
    compute_episode_reward,
    find_auxiliary_reply_reasons,
    find_replies_client_disconnected_from,
    find_retry_orphans,
    has_episode_reward,
    map_followers,
    sum_rewards,
)
from areal_hpc.session.tree import Interaction, InteractionTree, unpack_ids
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import (
    RouteArray,
    RowKind,
    RowRecord,
    SamplingMask,
    TrajectoryRow,
    lay_out_routes,
)

ExportStyle = Literal["concat", "individual"]
DEFAULT_EXPORT_SETTINGS = ExportSettings()
EMPTY_ROW_RECORD = RowRecord()


@dataclass(frozen=True, slots=True)
class EpisodeKey:
    """Episode that rows belong to, and the kind of rows."""

    ticket_id: int
    attempt: int
    episode: int
    kind: RowKind = RowKind.TRAIN
    eval_step: int = -1


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Path of interactions that becomes a row, before its arrays are built."""

    path: list[Interaction]
    trained: frozenset[str]
    """Ids of the interactions whose replies this row trains."""
    temperature: float
    reward: float
    followers: Followers = field(default_factory=dict)


def plan_rows(
    tree: InteractionTree, settings: ExportSettings = DEFAULT_EXPORT_SETTINGS
) -> list[RowPlan]:
    left_out = find_replies_without_credit(tree, settings.drop_retry_orphans)
    return _plan_rows_without(left_out, tree, settings)


def _plan_rows_without(
    left_out: set[str], tree: InteractionTree, settings: ExportSettings
) -> list[RowPlan]:
    followers = map_followers(tree, settings.credit, left_out)
    earned = compute_credited_rewards(
        tree, 1.0, settings.credit, left_out, own_is_total=settings.is_credited
    )
    kept = _find_trained_replies(tree, earned)
    total = compute_episode_reward(tree) or 0.0
    rows = []
    for path, trained, temperature in _iterate_paths_with_temperature(tree, kept, settings.style):
        # Credited rewards overlap and have no sum: people see the last one.
        last = earned[path[-1].interaction_id].total or 0.0
        reward = last if settings.is_credited else total
        rows.append(RowPlan(path, trained, temperature, reward, followers))
    return rows


def find_replies_without_credit(tree: InteractionTree, drop_retry_orphans: bool) -> set[str]:
    """Return the ids of retry orphans, auxiliary replies, and those that their clients left.

    In the chain of followers, a reply that its client left would cut off the replies before it.
    """
    return {
        *(find_retry_orphans(tree) if drop_retry_orphans else ()),
        *find_replies_client_disconnected_from(tree),
        *find_auxiliary_reply_reasons(tree),
    }


def _find_trained_replies(
    tree: InteractionTree, earned: Mapping[str, InteractionReward]
) -> set[str]:
    """Return the completed interactions of `earned` that a reward reaches, or that extend these.

    The reward of an episode reaches all of them.
    """
    if has_episode_reward(tree):
        return {reply for reply in earned if tree[reply].completed}
    kept, rewarded = set[str](), set[str]()
    for interaction in tree:  # parents come first
        reply = interaction.interaction_id
        if reply not in earned:
            continue
        if interaction.reward is not None or interaction.parent_id in rewarded:
            rewarded.add(reply)
        if interaction.completed and (reply in rewarded or earned[reply].total is not None):
            kept.add(reply)
    return kept


def _iterate_paths_with_temperature(
    tree: InteractionTree, kept_reply_ids: Collection[str], style: ExportStyle
) -> Iterator[tuple[list[Interaction], frozenset[str], float]]:
    if style == "individual":
        for call in tree:
            if call.interaction_id in kept_reply_ids:
                path = tree.get_path_to(call)
                yield path, frozenset([call.interaction_id]), call.temperature
        return
    for path, fresh in find_leaf_paths(tree, kept_reply_ids):
        new = [
            call
            for call in path
            if call.interaction_id in fresh and call.interaction_id in kept_reply_ids
        ]
        for temperature in dict.fromkeys(call.temperature for call in new):
            trained = frozenset(c.interaction_id for c in new if c.temperature == temperature)
            last = max(i for i, call in enumerate(path) if call.interaction_id in trained)
            yield path[: last + 1], trained, temperature


def find_leaf_paths(
    tree: InteractionTree, kept_reply_ids: Collection[str]
) -> Iterator[tuple[list[Interaction], frozenset[str]]]:
    """Yield the path from the root to each kept reply that no other kept reply extends.

    With each comes the set of its interactions that no earlier path had.
    """
    extended = set[str]()
    for reply in kept_reply_ids:
        parent = tree[reply].parent_id
        while parent is not None and parent not in extended:
            extended.add(parent)
            parent = tree[parent].parent_id
    covered: set[str] = set()
    for leaf in tree:
        if leaf.interaction_id in kept_reply_ids and leaf.interaction_id not in extended:
            path = tree.get_path_to(leaf)
            ids = dict.fromkeys(call.interaction_id for call in path)
            yield path, frozenset(ids.keys() - covered)
            covered.update(ids)


def plan_rows_with_unrewarded(
    tree: InteractionTree, style: ExportStyle, rewards: Mapping[str, float | None]
) -> list[RowPlan]:
    """Plan rows of all interactions in `rewards`; one without a reward gets 0.

    It is for users who train elsewhere and decide the value of a row themselves. In `concat` a row
    has the reward of its leaf.
    """
    if style == "individual":
        paths = [(tree.get_path_to(tree[reply]), frozenset([reply])) for reply in rewards]
    else:
        completed = [reply for reply in rewards if tree[reply].completed]
        paths = list(find_leaf_paths(tree, completed))
    return [
        RowPlan(path, trained, path[-1].temperature, rewards[path[-1].interaction_id] or 0.0)
        for path, trained in paths
    ]


def build_areal_batch(plan: RowPlan) -> dict[str, npt.NDArray[Any]]:
    """Build a row's arrays with the names that AReaL's trainers use and a batch dimension of one.

    Returns:
        `input_ids`, `loss_mask`, `versions` int64 [1, T], `logprobs` float32 [1, T],
        `turn_ids` int32 [1, T] (-1 where nothing is trained), `attention_mask` bool [1, T],
        `rewards` float32 [1].
    """
    row = build_row(plan, EpisodeKey(0, 0, 0), 0)
    turn_ids_T = np.full(row.num_tokens, -1, np.int32)
    trained = [call for call in plan.path if call.interaction_id in plan.trained]
    for turn, call in enumerate(trained):
        turn_ids_T[call.prompt_tokens : call.num_sequence_tokens] = turn
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_ids": row.input_ids_T.astype(np.int64),
        "loss_mask": row.loss_mask_T.astype(np.int64),
        "logprobs": row.logprobs_T,
        "versions": row.versions_T,
        "turn_ids": turn_ids_T,
        "attention_mask": np.ones(row.num_tokens, np.bool_),
    }
    batch = {name: array[None] for name, array in arrays.items()}
    batch["rewards"] = np.array([plan.reward], np.float32)
    return batch


def build_training_rows(
    tree: InteractionTree,
    key: EpisodeKey,
    record: RowRecord = EMPTY_ROW_RECORD,
    settings: ExportSettings = DEFAULT_EXPORT_SETTINGS,
) -> list[TrajectoryRow]:
    """Build a session's rows, each with `record` and its calls; ValueError without a reward."""
    if len(tree) and compute_episode_reward(tree) is None:
        raise ValueError("a session without rewards cannot be exported for training")
    left_out = find_replies_without_credit(tree, settings.drop_retry_orphans)
    plans = _plan_rows_without(left_out, tree, settings)
    completed = {call.interaction_id for call in tree if call.completed} - left_out
    trained = frozenset[str]().union(*(plan.trained for plan in plans))
    record = msgspec.structs.replace(
        record,
        is_credited=settings.is_credited,
        unrewarded_replies=len(completed - trained),
    )
    return [build_row(plan, key, index, record) for index, plan in enumerate(plans)]


def build_auxiliary_rows(
    tree: InteractionTree, key: EpisodeKey, record: RowRecord, first_row: int
) -> list[TrajectoryRow]:
    """Build the rows of a session's auxiliary conversations, numbered from `first_row`."""
    reasons = find_auxiliary_reply_reasons(tree)
    completed = [reply for reply in reasons if tree[reply].completed]
    rows = list[TrajectoryRow]()
    for path, fresh in find_leaf_paths(tree, completed):
        plan = RowPlan(path, fresh, path[-1].temperature, 0.0)
        reason = reasons[path[-1].interaction_id]
        row_record = msgspec.structs.replace(record, auxiliary_reason=reason)
        rows.append(build_row(plan, key, first_row + len(rows), row_record))
    return rows


def build_failed_session_rows(
    tree: InteractionTree, key: EpisodeKey, record: RowRecord
) -> list[TrajectoryRow]:
    plans, covered = list[RowPlan](), set[str]()
    for leaf in tree.list_leaves():
        path = tree.get_path_to(leaf)
        ids = {call.interaction_id for call in path}
        reward = sum_rewards(*(call.reward for call in path)) or 0.0
        plans.append(RowPlan(path, frozenset(ids - covered), leaf.temperature, reward))
        covered |= ids
    plans = plans or [RowPlan([], frozenset(), 1.0, 0.0)]
    return [build_row(plan, key, index, record) for index, plan in enumerate(plans)]


def build_row(
    plan: RowPlan, key: EpisodeKey, index: int, record: RowRecord = EMPTY_ROW_RECORD
) -> TrajectoryRow:
    """Build the arrays of a planned row, and complete `record` with the calls of its path."""
    length = plan.path[-1].num_sequence_tokens if plan.path else 0
    input_ids_T = np.empty(length, np.int32)
    loss_mask_T = np.zeros(length, np.uint8)
    logprobs_T = np.zeros(length, np.float32)
    versions_T = np.full(length, -1, np.int64)
    offset = 0
    for call in plan.path:
        new_ids, output_ids = unpack_ids(call.new_ids), unpack_ids(call.output_ids)
        start = offset + len(new_ids)
        end = start + len(output_ids)
        input_ids_T[offset:start] = new_ids
        input_ids_T[start:end] = output_ids
        if call.interaction_id in plan.trained:
            loss_mask_T[start:end] = 1
            logprobs_T[start:end] = np.frombuffer(call.logprobs, "<f4")
            for span in call.spans:
                versions_T[start + span.start : start + span.end] = span.version
        offset = end
    if offset != length:
        raise AssertionError(f"the interactions of a path hold {offset} tokens, its leaf {length}")
    mask = _build_sampling_mask(plan, length)
    calls, tool_schemas = build_call_records(plan.path, plan.trained, plan.followers)
    return TrajectoryRow(
        ticket_id=key.ticket_id,
        attempt=key.attempt,
        episode=key.episode,
        row=index,
        input_ids_T=input_ids_T,
        loss_mask_T=loss_mask_T,
        logprobs_T=logprobs_T,
        versions_T=versions_T,
        reward=plan.reward,
        temperature=plan.temperature or 1.0,  # greedy: the engine's log-probs are unscaled
        kind=key.kind,
        eval_step=key.eval_step,
        record=msgspec.structs.replace(record, calls=calls, reward=plan.reward),
        meta={"messages": [m for call in plan.path for m in (*call.new_messages, call.reply)]},
        tool_schemas=tool_schemas,
        sampling_mask=mask,
        routes_TLK=_join_routes(plan, length),
    )


def _join_routes(plan: RowPlan, length: int) -> RouteArray | None:
    """Join the experts of each token in the pass that sampled its successor, or first read it."""
    ends = [(c.num_sequence_tokens - 1, c.routes.unpack()) for c in plan.path if c.routes]
    return lay_out_routes([(end - len(part), part) for end, part in ends], length)


def _build_sampling_mask(plan: RowPlan, length: int) -> SamplingMask | None:
    trained = [c for c in plan.path if c.interaction_id in plan.trained and c.kept_counts]
    if not trained:
        return None
    counts_T = np.zeros(length, np.uint16)
    for call in trained:
        counts_T[call.prompt_tokens : call.num_sequence_tokens] = np.frombuffer(
            call.kept_counts, "<u2"
        )
    return SamplingMask(counts_T, np.concatenate([unpack_ids(call.kept_ids) for call in trained]))

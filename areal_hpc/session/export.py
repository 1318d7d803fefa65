"""A session's tree -> training rows, in one of two styles.

`concat`: one row per leaf, the token sequence from the root to that leaf. A reply that several
leaves share is trained in the first of them and is context in the others, so that each sampled
token is trained once. A path whose replies were sampled at different temperatures gives one row
per temperature, because a row is trained at one.

`individual`: one row per interaction, in which only its own reply is trained.

The style decides how replies are packed and nothing else: both train the same replies, and every
row has the episode's reward, all that was given to its replies added up. What each reply earns, the
trainer works out from the row's record, which says who follows whom (`session.credit`).

A number that was given for the whole episode trains all its completed replies. Where rewards name
replies, one that no reward reaches, neither its own nor one given earlier or later in its
conversation, teaches nothing and is no row; it may be context in others, and its episode's record
counts it. One that its client left is not trained.
Auxiliary conversations are rows of a kind of their own, in no batch, and take no part in credit.
A session that failed is kept whole, for people to read: a row per leaf, whatever was rewarded.
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
    """Which episode of which ticket the rows belong to, and why they are recorded."""

    ticket_id: int
    attempt: int
    episode: int
    kind: RowKind = RowKind.TRAIN
    eval_step: int = -1


@dataclass(frozen=True, slots=True)
class RowPlan:
    path: list[Interaction]
    trained: frozenset[str]
    """Interactions whose replies this row trains."""
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
        # What replies earned cannot be added up: people are shown the last one's.
        last = earned[path[-1].interaction_id].total or 0.0
        reward = last if settings.is_credited else total
        rows.append(RowPlan(path, trained, temperature, reward, followers))
    return rows


def find_replies_without_credit(tree: InteractionTree, drop_retry_orphans: bool) -> set[str]:
    """Ids of the replies that are in no row: of retries, of clients that left, and auxiliary ones.

    A reply whose client left would cut off those that it stands between.
    """
    return {
        *(find_retry_orphans(tree) if drop_retry_orphans else ()),
        *find_replies_client_disconnected_from(tree),
        *find_auxiliary_reply_reasons(tree),
    }


def _find_trained_replies(
    tree: InteractionTree, earned: Mapping[str, InteractionReward]
) -> set[str]:
    """Completed interactions of `earned` that a reward reaches, or that go on from one of these.

    The reward of an episode reaches all of them.
    """
    if has_episode_reward(tree):
        return {name for name in earned if tree[name].completed}
    kept, rewarded = set[str](), set[str]()
    for one in tree:  # parents come first
        name = one.interaction_id
        if name not in earned:
            continue
        if one.reward is not None or one.parent_id in rewarded:
            rewarded.add(name)
        if one.completed and (name in rewarded or earned[name].total is not None):
            kept.add(name)
    return kept


def _iterate_paths_with_temperature(
    tree: InteractionTree, kept_reply_ids: Collection[str], style: ExportStyle
) -> Iterator[tuple[list[Interaction], frozenset[str], float]]:
    if style == "individual":
        for one in tree:
            if one.interaction_id in kept_reply_ids:
                path = tree.get_path_to(one)
                yield path, frozenset([one.interaction_id]), one.temperature
        return
    for path, fresh in find_leaf_paths(tree, kept_reply_ids):
        new = [
            one
            for one in path
            if one.interaction_id in fresh and one.interaction_id in kept_reply_ids
        ]
        for temperature in dict.fromkeys(one.temperature for one in new):
            trained = frozenset(one.interaction_id for one in new if one.temperature == temperature)
            last = max(i for i, one in enumerate(path) if one.interaction_id in trained)
            yield path[: last + 1], trained, temperature


def find_leaf_paths(
    tree: InteractionTree, kept_reply_ids: Collection[str]
) -> Iterator[tuple[list[Interaction], frozenset[str]]]:
    """From the root to each kept reply that no other of them extends, with what is new in the path.

    New are the interactions that no earlier path had.
    """
    extended = set[str]()
    for name in kept_reply_ids:
        before = tree[name].parent_id
        while before is not None and before not in extended:
            extended.add(before)
            before = tree[before].parent_id
    covered: set[str] = set()
    for leaf in tree:
        if leaf.interaction_id in kept_reply_ids and leaf.interaction_id not in extended:
            path = tree.get_path_to(leaf)
            names = dict.fromkeys(one.interaction_id for one in path)
            yield path, frozenset(names.keys() - covered)
            covered.update(names)


def plan_rows_with_unrewarded(
    tree: InteractionTree, style: ExportStyle, rewards: Mapping[str, float | None]
) -> list[RowPlan]:
    """Rows of all interactions in `rewards`, also of those that no reward reaches: these have 0.

    For those who train elsewhere and judge for themselves what a row is worth. In `concat` a
    row has the reward of its leaf.
    """
    if style == "individual":
        chosen = [(tree.get_path_to(tree[name]), frozenset([name])) for name in rewards]
    else:
        completed = [name for name in rewards if tree[name].completed]
        chosen = list(find_leaf_paths(tree, completed))
    return [
        RowPlan(path, trained, path[-1].temperature, rewards[path[-1].interaction_id] or 0.0)
        for path, trained in chosen
    ]


def build_areal_batch(plan: RowPlan) -> dict[str, npt.NDArray[Any]]:
    """A row under the names that AReaL's trainers use, with a batch dimension of one.

    Returns:
        `input_ids`, `loss_mask`, `versions` int64 [1, T], `logprobs` float32 [1, T],
        `turn_ids` int32 [1, T] (-1 where nothing is trained), `attention_mask` bool [1, T],
        `rewards` float32 [1].
    """
    row = build_row(plan, EpisodeKey(0, 0, 0), 0)
    turn_ids_T = np.full(row.num_tokens, -1, np.int32)
    trained = [one for one in plan.path if one.interaction_id in plan.trained]
    for turn, one in enumerate(trained):
        turn_ids_T[one.prompt_tokens : one.num_sequence_tokens] = turn
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
    """The rows of a session, each with `record` and its own calls; ValueError without a reward."""
    if len(tree) and compute_episode_reward(tree) is None:
        raise ValueError("a session without rewards cannot be exported for training")
    left_out = find_replies_without_credit(tree, settings.drop_retry_orphans)
    plans = _plan_rows_without(left_out, tree, settings)
    completed = {one.interaction_id for one in tree if one.completed} - left_out
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
    """The rows of a session's auxiliary conversations, numbered from `first_row`."""
    reasons = find_auxiliary_reply_reasons(tree)
    completed = [name for name in reasons if tree[name].completed]
    rows = list[TrajectoryRow]()
    for path, fresh in find_leaf_paths(tree, completed):
        plan = RowPlan(path, fresh, path[-1].temperature, 0.0)
        reason = reasons[path[-1].interaction_id]
        told = msgspec.structs.replace(record, auxiliary_reason=reason)
        rows.append(build_row(plan, key, first_row + len(rows), told))
    return rows


def build_failed_session_rows(
    tree: InteractionTree, key: EpisodeKey, record: RowRecord
) -> list[TrajectoryRow]:
    plans, covered = list[RowPlan](), set[str]()
    for leaf in tree.list_leaves():
        path = tree.get_path_to(leaf)
        names = {one.interaction_id for one in path}
        reward = sum_rewards(*(one.reward for one in path)) or 0.0
        plans.append(RowPlan(path, frozenset(names - covered), leaf.temperature, reward))
        covered |= names
    plans = plans or [RowPlan([], frozenset(), 1.0, 0.0)]
    return [build_row(plan, key, index, record) for index, plan in enumerate(plans)]


def build_row(
    plan: RowPlan, key: EpisodeKey, index: int, record: RowRecord = EMPTY_ROW_RECORD
) -> TrajectoryRow:
    """The arrays of a planned row, and `record` with the calls of its path."""
    length = plan.path[-1].num_sequence_tokens if plan.path else 0
    input_ids_T = np.empty(length, np.int32)
    loss_mask_T = np.zeros(length, np.uint8)
    logprobs_T = np.zeros(length, np.float32)
    versions_T = np.full(length, -1, np.int64)
    at = 0
    for one in plan.path:
        new_ids, output_ids = unpack_ids(one.new_ids), unpack_ids(one.output_ids)
        start = at + len(new_ids)
        end = start + len(output_ids)
        input_ids_T[at:start] = new_ids
        input_ids_T[start:end] = output_ids
        if one.interaction_id in plan.trained:
            loss_mask_T[start:end] = 1
            logprobs_T[start:end] = np.frombuffer(one.logprobs, "<f4")
            for span in one.spans:
                versions_T[start + span.start : start + span.end] = span.version
        at = end
    if at != length:
        raise AssertionError(f"the interactions of a path hold {at} tokens, its leaf {length}")
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
        meta={"messages": [m for one in plan.path for m in (*one.new_messages, one.reply)]},
        tool_schemas=tool_schemas,
        sampling_mask=mask,
        routes_TLK=_join_routes(plan, length),
    )


def _join_routes(plan: RowPlan, length: int) -> RouteArray | None:
    """Each token's experts in the pass that sampled what follows it, or first read it."""
    ends = [(one.num_sequence_tokens - 1, one.routes.unpack()) for one in plan.path if one.routes]
    return lay_out_routes([(end - len(part), part) for end, part in ends], length)


def _build_sampling_mask(plan: RowPlan, length: int) -> SamplingMask | None:
    trained = [one for one in plan.path if one.interaction_id in plan.trained and one.kept_counts]
    if not trained:
        return None
    counts_T = np.zeros(length, np.uint16)
    for one in trained:
        counts_T[one.prompt_tokens : one.num_sequence_tokens] = np.frombuffer(
            one.kept_counts, "<u2"
        )
    return SamplingMask(counts_T, np.concatenate([unpack_ids(one.kept_ids) for one in trained]))

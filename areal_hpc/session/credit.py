"""Rewards of interactions, and how they pass back from a reply to the turns that led to it.

An agent rewards one interaction by its id, or the last one completed. Failed requests never become
interactions, so they never count as the last. Auxiliary conversations serve an episode and are not
learned from.

What an interaction earns is its own reward plus `turn_discount` times what its followers earn, the
mean of them if there are several. A rule says which interactions follow which:

`tree`: where a reward names a reply, the interactions that extend it. Conversations that no prefix
links (an agent hands over to another one, whose instructions differ) follow one another when they
do not overlap in time. Those that ran side by side stay apart, so that no reward leaks between
siblings; both pass on to whatever began after all of them had ended. Where no reward names a reply,
what was given is the whole episode's, and all its interactions led to it: each is followed by the
one that was completed next.

`chronological`: the interaction whose request arrived next, whatever it was about; one without any
reward earns 0. This is AReaL's rule (`InteractionCache.apply_reward_discount`).

On a conversation of one turn after the other they agree.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Literal

from areal_hpc.errors import InvalidRewardError, UnknownInteractionError
from areal_hpc.session.call_records import decode_rendering_context
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.agent_reward import MAX_REWARD, Reward, parse_reward_number
from areal_hpc.wire.proxy import RecordedConversationSummary

CreditRule = Literal["tree", "chronological"]
Followers = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class InteractionReward:
    """Reward of one interaction: its own, and what followers pass back. None: none reaches it."""

    own: float | None
    passed_back: float | None

    @property
    def total(self) -> float | None:
        return sum_rewards(self.own, self.passed_back)


def compute_credited_rewards(
    tree: InteractionTree,
    turn_discount: float,
    rule: CreditRule = "tree",
    left_out: Collection[str] = (),
    *,
    own_is_total: bool = False,
) -> dict[str, InteractionReward]:
    """Reward of every interaction of a session, by id, in order of completion.

    Those `left_out`, which have no followers, are ignored; for `own_is_total` see
    `pass_back_rewards`. A discount that is not finite is an InvalidRewardError.
    """
    if not math.isfinite(turn_discount):
        raise InvalidRewardError(f"a turn discount must be a finite number, got {turn_discount}")
    own = {one.interaction_id: one.reward for one in tree if one.interaction_id not in left_out}
    if rule == "chronological":
        own = {name: 0.0 if reward is None else reward for name, reward in own.items()}
    followers = map_followers(tree, rule, left_out)
    return pass_back_rewards(own, followers, turn_discount, own_is_total=own_is_total)


def map_followers(
    tree: InteractionTree, rule: CreditRule = "tree", left_out: Collection[str] = ()
) -> dict[str, list[str]]:
    """The ids of each interaction's followers, by its id; those `left_out` are ignored."""
    kept = [one for one in tree if one.interaction_id not in left_out]
    if rule == "chronological":
        order = sorted(kept, key=lambda one: one.asked_at)
    elif has_episode_reward(tree):
        order = kept
    else:
        return _map_followers_by_tree(kept)
    return {one.interaction_id: [after.interaction_id] for one, after in itertools.pairwise(order)}


def has_episode_reward(tree: InteractionTree) -> bool:
    rewarded = [one for one in tree if one.reward is not None]
    return bool(rewarded) and not any(one.is_reward_named for one in rewarded)


def pass_back_rewards(
    own_reward_by_id: Mapping[str, float | None],
    followers: Followers,
    turn_discount: float,
    *,
    own_is_total: bool = False,
) -> dict[str, InteractionReward]:
    """What each interaction earns, in the order of `own_reward_by_id`, the rewards that were given.

    With `own_is_total` a reward that was given is all that its interaction earns.
    """
    earned: dict[str, InteractionReward] = {}
    for name in TopologicalSorter(
        {name: followers.get(name, ()) for name in own_reward_by_id}
    ).static_order():
        reward = own_reward_by_id.get(name)
        totals = [
            total
            for follower in followers.get(name, ())
            if (total := earned[follower].total) is not None
        ]
        if own_is_total and reward is not None:
            totals = []
        passed_back = turn_discount * math.fsum(totals) / len(totals) if totals else None
        earned[name] = InteractionReward(reward, passed_back)
    return {name: earned[name] for name in own_reward_by_id}


def compute_branch_weight_by_reply(
    earned: Mapping[str, InteractionReward], followers: Followers
) -> dict[str, float]:
    """The share of the episode's return that each interaction's terms stand for, by id.

    A return is the mean over the branches after a reply, so each of k branches weighs 1/k; those
    that begin an episode side by side are branches too. Where branches meet again their weights add
    up. A branch that no reward reaches is none. All of a conversation without branches weighs 1.
    """
    counting = {name for name, one in earned.items() if one.total is not None}
    after = {name: [one for one in followers.get(name, ()) if one in counting] for name in counting}
    before: dict[str, list[str]] = {name: [] for name in counting}
    for name, following in after.items():
        for one in following:
            before[one].append(name)
    roots = [name for name, preceding in before.items() if not preceding]
    weights: dict[str, float] = {}
    for name in TopologicalSorter(before).static_order():
        shares = [weights[one] / len(after[one]) for one in before[name]]
        weights[name] = math.fsum(shares) if shares else 1 / len(roots)
    return weights


def sum_rewards(*rewards: float | None) -> float | None:
    """The sum of those that are not None, within what a shard can hold; None if all are."""
    given = [reward for reward in rewards if reward is not None]
    if not given:
        return None
    return max(-MAX_REWARD, min(math.fsum(given), MAX_REWARD))


def _map_followers_by_tree(interactions: Sequence[Interaction]) -> dict[str, list[str]]:
    followers: dict[str, list[str]] = {}
    conversations: dict[str, list[Interaction]] = {}  # by their first interaction
    first: dict[str, str] = {}
    for one in interactions:
        if one.parent_id is None:
            first[one.interaction_id] = one.interaction_id
        else:
            first[one.interaction_id] = first[one.parent_id]
            followers.setdefault(one.parent_id, []).append(one.interaction_id)
        conversations.setdefault(first[one.interaction_id], []).append(one)
    phases = _group_overlapping_conversations(list(conversations.values()))
    for phase, after in itertools.pairwise(phases):
        for conversation in phase:
            last = conversation[-1].interaction_id
            followers[last] = [following[0].interaction_id for following in after]
    return followers


def _group_overlapping_conversations(
    conversations: list[list[Interaction]],
) -> list[list[list[Interaction]]]:
    def get_begin_time(conversation: list[Interaction]) -> float:
        return min(one.asked_at for one in conversation)

    phases: list[list[list[Interaction]]] = []
    busy_until = -math.inf
    for conversation in sorted(conversations, key=get_begin_time):
        if not phases or get_begin_time(conversation) >= busy_until:
            phases.append([])
        phases[-1].append(conversation)
        busy_until = max(busy_until, *(one.answered_at for one in conversation))
    return phases


def find_replies_client_disconnected_from(tree: InteractionTree) -> frozenset[str]:
    """Ids of replies whose client left before their end, and which nothing extends."""
    extended = {one.parent_id for one in tree}
    return frozenset(
        one.interaction_id
        for one in tree
        if not one.completed and one.interaction_id not in extended
    )


def find_retry_orphans(tree: InteractionTree) -> frozenset[str]:
    """Ids of replies that nobody used: a retry of the same request came after they were given.

    A client whose connection broke repeats its request, and says so, though the first reply was
    recorded. Replies that were extended, rewarded, or sampled side by side are none. An equal
    request that does not call itself a retry is another sample.
    """
    used = {one.parent_id for one in tree}
    equal_replies: dict[tuple[object, ...], list[Interaction]] = {}
    for one in tree:
        request = (one.parent_id, one.context, one.new_ids, one.temperature)
        equal_replies.setdefault(request, []).append(one)
    orphans = set[str]()
    for replies in equal_replies.values():
        unused = [one for one in replies if one.interaction_id not in used and one.reward is None]
        for retry in (one for one in replies if one.is_retry):
            before = [one for one in unused if 0 < one.answered_at <= retry.asked_at]
            if before:  # the newest is the one that the retry repeats
                orphans.add(before[-1].interaction_id)
                unused.remove(before[-1])
    return frozenset(orphans)


def find_interaction_to_reward(tree: InteractionTree, interaction_id: str | None) -> Interaction:
    auxiliary = find_auxiliary_reply_reasons(tree)
    if interaction_id is None:
        for one in reversed(list(tree)):
            if one.completed and one.interaction_id not in auxiliary:
                return one
        but = f" but the {len(auxiliary)} of auxiliary conversations" if auxiliary else ""
        raise InvalidRewardError(f"the session has no completed interaction to reward{but}")
    if interaction_id in auxiliary:
        raise InvalidRewardError(
            f"interaction {interaction_id!r} is of an auxiliary conversation "
            f"({auxiliary[interaction_id]}), which earns nothing"
        )
    if interaction_id not in tree:
        known = ", ".join(one.interaction_id for one in tree) or "none"
        raise UnknownInteractionError(
            f"no interaction {interaction_id!r} in this session; it has: {known}"
        )
    return tree[interaction_id]


def give_reward(interaction: Interaction, reward: Reward, is_named: bool) -> None:
    """Reward an interaction; a second reward replaces the first.

    `is_named` says that the agent chose this reply by its id.
    """
    interaction.reward, interaction.given_reward = reward.value, reward
    interaction.is_reward_named = is_named


def parse_reward(reward: object) -> Reward:
    return reward if isinstance(reward, Reward) else Reward(parse_reward_number(reward))


def compute_episode_reward(tree: InteractionTree, is_credited: bool = False) -> float | None:
    """All rewards of a session added up; None without any.

    Those that say what each reply earned (`is_credited`) overlap: then the last one counts.
    """
    given = [one.reward for one in tree if one.reward is not None]
    return sum_rewards(*(given[-1:] if is_credited else given))


def list_conversations(tree: InteractionTree) -> list[RecordedConversationSummary]:
    """What each conversation of a session began with, in order of completion."""
    root_of = _map_replies_to_roots(tree)
    replies: dict[str, int] = {}
    for root in root_of.values():
        replies[root] = replies.get(root, 0) + 1
    summaries = []
    for root, count in replies.items():
        first = tree[root]
        tools = decode_rendering_context(first.context).tools
        offered = [one for one in tools if isinstance(one, dict)] if isinstance(tools, list) else []
        functions = [one.get("function", one) for one in offered]
        names = [str(one.get("name", "")) for one in functions if isinstance(one, dict)]
        summaries.append(
            RecordedConversationSummary(root, first.new_messages, first.reply, names, count)
        )
    return summaries


def find_auxiliary_reply_reasons(tree: InteractionTree) -> dict[str, str]:
    """Ids of the replies of auxiliary conversations, with the reason why they are."""
    if not tree.auxiliary:
        return {}
    return {
        name: tree.auxiliary[root]
        for name, root in _map_replies_to_roots(tree).items()
        if root in tree.auxiliary
    }


def find_conversation_replies(tree: InteractionTree, roots: Collection[str]) -> list[Interaction]:
    return [tree[name] for name, root in _map_replies_to_roots(tree).items() if root in roots]


def _map_replies_to_roots(tree: InteractionTree) -> dict[str, str]:
    roots: dict[str, str] = {}
    for one in tree:  # parents come first
        roots[one.interaction_id] = roots[one.parent_id] if one.parent_id else one.interaction_id
    return roots

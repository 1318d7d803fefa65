"""Credit assignment: rewards of interactions, and their way back to the turns that led to them.

An agent rewards one interaction by its id, or the last one completed. Failed requests never become
interactions, so they never count as the last. Auxiliary conversations serve an episode and are not
trained.

An interaction earns its own reward plus `turn_discount` times the mean of what its followers earn.
A rule defines the followers of an interaction:

`tree`: if a reward names a reply, the interactions that extend it. Conversations without a common
prefix (an agent hands over to another one, whose instructions differ) follow one another if they
do not overlap in time. Conversations that ran side by side do not follow one another, so that no
reward passes between siblings; all are followed by those that began after all of them had ended. If
no reward names a reply, the reward is that of the whole episode, and all its interactions led to
it: each is followed by the one that was completed next.

`agents`: as `tree`, and where requests name their agents (`CallFacts.agent_id`) a sub-agent's
conversation lies between two calls of its parent: it follows the last that was answered before it,
and the first that was asked after it follows the sub-agent. So a reward that names the parent's
reply reaches what its sub-agents said, and no sibling's.

`chronological`: the interaction whose request arrived next, whatever its conversation; one without
any reward earns 0. This is AReaL's rule (`InteractionCache.apply_reward_discount`).

For a single conversation without branches the two rules agree.
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

CreditRule = Literal["tree", "agents", "chronological"]
Followers = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class InteractionReward:
    """Reward of one interaction: its own, and the share of its followers; None for no reward."""

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
    """Return the reward of every interaction of a session by id, in order of completion.

    Interactions in `left_out`, which have no followers, are ignored; for `own_is_total` see
    `pass_back_rewards`. A discount that is not finite raises InvalidRewardError.
    """
    if not math.isfinite(turn_discount):
        raise InvalidRewardError(f"a turn discount must be a finite number, got {turn_discount}")
    own = {call.interaction_id: call.reward for call in tree if call.interaction_id not in left_out}
    if rule == "chronological":
        own = {reply: 0.0 if reward is None else reward for reply, reward in own.items()}
    followers = map_followers(tree, rule, left_out)
    return pass_back_rewards(own, followers, turn_discount, own_is_total=own_is_total)


def map_followers(
    tree: InteractionTree, rule: CreditRule = "tree", left_out: Collection[str] = ()
) -> dict[str, list[str]]:
    """Return the ids of each interaction's followers by its id, without those in `left_out`."""
    kept = [call for call in tree if call.interaction_id not in left_out]
    if rule == "chronological":
        order = sorted(kept, key=lambda call: call.asked_at)
    elif has_episode_reward(tree):
        order = kept
    else:
        return _map_followers_by_tree(kept, by_agents=rule == "agents")
    return {a.interaction_id: [b.interaction_id] for a, b in itertools.pairwise(order)}


def has_episode_reward(tree: InteractionTree) -> bool:
    """Return whether there are rewards, and none of them names a reply."""
    rewarded = [call for call in tree if call.reward is not None]
    return bool(rewarded) and not any(call.is_reward_named for call in rewarded)


def pass_back_rewards(
    own_reward_by_id: Mapping[str, float | None],
    followers: Followers,
    turn_discount: float,
    *,
    own_is_total: bool = False,
) -> dict[str, InteractionReward]:
    """Return what each interaction earns, in the order of `own_reward_by_id`.

    With `own_is_total` an interaction with a reward of its own earns nothing from its followers.
    """
    earned: dict[str, InteractionReward] = {}
    for reply in TopologicalSorter(
        {reply: followers.get(reply, ()) for reply in own_reward_by_id}
    ).static_order():
        reward = own_reward_by_id.get(reply)
        totals = [
            total
            for follower in followers.get(reply, ())
            if (total := earned[follower].total) is not None
        ]
        if own_is_total and reward is not None:
            totals = []
        passed_back = turn_discount * math.fsum(totals) / len(totals) if totals else None
        earned[reply] = InteractionReward(reward, passed_back)
    return {reply: earned[reply] for reply in own_reward_by_id}


def compute_branch_weight_by_reply(
    earned: Mapping[str, InteractionReward], followers: Followers
) -> dict[str, float]:
    """Return the weight of each interaction in the return of its episode, by id.

    A return is the mean over the branches after a reply, so each of k branches weighs 1/k;
    conversations that begin an episode side by side are branches too. If branches meet again, their
    weights add up. A branch without a reward does not count. Without branches all weigh 1.
    """
    counting = {reply for reply, reward in earned.items() if reward.total is not None}
    after = {
        reply: [follower for follower in followers.get(reply, ()) if follower in counting]
        for reply in counting
    }
    before: dict[str, list[str]] = {reply: [] for reply in counting}
    for reply, following in after.items():
        for follower in following:
            before[follower].append(reply)
    roots = [reply for reply, preceding in before.items() if not preceding]
    weights: dict[str, float] = {}
    for reply in TopologicalSorter(before).static_order():
        shares = [weights[parent] / len(after[parent]) for parent in before[reply]]
        weights[reply] = math.fsum(shares) if shares else 1 / len(roots)
    return weights


def sum_rewards(*rewards: float | None) -> float | None:
    """Return the sum of the rewards that are not None, within `MAX_REWARD`; None if all are."""
    present = [reward for reward in rewards if reward is not None]
    if not present:
        return None
    return max(-MAX_REWARD, min(math.fsum(present), MAX_REWARD))


def _map_followers_by_tree(
    interactions: Sequence[Interaction], *, by_agents: bool
) -> dict[str, list[str]]:
    followers: dict[str, list[str]] = {}
    conversations: dict[str, list[Interaction]] = {}  # by their first interaction
    first: dict[str, str] = {}
    for call in interactions:
        if call.parent_id is None:
            first[call.interaction_id] = call.interaction_id
        else:
            first[call.interaction_id] = first[call.parent_id]
            followers.setdefault(call.parent_id, []).append(call.interaction_id)
        conversations.setdefault(first[call.interaction_id], []).append(call)
    sub_agents: list[list[Interaction]] = []
    if by_agents:
        agents = {call.agent_id for call in interactions}
        for first_id, conversation in [*conversations.items()]:
            agent_id, parent_id = conversation[0].agent_id, conversation[0].parent_agent_id
            if agent_id != parent_id and parent_id in agents:
                sub_agents.append(conversations.pop(first_id))
    phases = _group_overlapping_conversations(list(conversations.values()))
    for phase, after in itertools.pairwise(phases):
        for conversation in phase:
            last = conversation[-1].interaction_id
            followers[last] = [following[0].interaction_id for following in after]
    for conversation in sub_agents:  # between the calls of parents that are linked by now
        parent_id = conversation[0].parent_agent_id
        parent_calls = [call for call in interactions if call.agent_id == parent_id]
        _insert_sub_agent(conversation, parent_calls, followers)
    return followers


def _insert_sub_agent(
    conversation: Sequence[Interaction],
    parent_calls: Sequence[Interaction],
    followers: dict[str, list[str]],
) -> None:
    """Link a sub-agent's conversation to its parent's calls before and after it."""
    begin = min(call.asked_at for call in conversation)
    end = max(call.answered_at for call in conversation)
    before = [call for call in parent_calls if call.answered_at <= begin]
    after = [call for call in parent_calls if call.asked_at >= end and call.answered_at > begin]
    following = list[str]()
    if before:
        caller = max(before, key=lambda call: call.answered_at)
        following = followers.setdefault(caller.interaction_id, [])
        following.append(conversation[0].interaction_id)
    if after:
        reader = min(after, key=lambda call: call.asked_at).interaction_id
        followers.setdefault(conversation[-1].interaction_id, []).append(reader)
        if reader in following:
            following.remove(reader)  # it follows through the sub-agent


def _group_overlapping_conversations(
    conversations: list[list[Interaction]],
) -> list[list[list[Interaction]]]:
    def get_begin_time(conversation: list[Interaction]) -> float:
        return min(call.asked_at for call in conversation)

    phases: list[list[list[Interaction]]] = []
    busy_until = -math.inf
    for conversation in sorted(conversations, key=get_begin_time):
        if not phases or get_begin_time(conversation) >= busy_until:
            phases.append([])
        phases[-1].append(conversation)
        busy_until = max(busy_until, *(call.answered_at for call in conversation))
    return phases


def find_replies_client_disconnected_from(tree: InteractionTree) -> frozenset[str]:
    """Return the ids of replies whose client left before their end, and which nothing extends."""
    extended = {call.parent_id for call in tree}
    return frozenset(
        call.interaction_id
        for call in tree
        if not call.completed and call.interaction_id not in extended
    )


def find_retry_orphans(tree: InteractionTree) -> frozenset[str]:
    """Return the ids of unused replies whose client repeated its request after they were complete.

    A client whose connection broke marks the repeated request as a retry, though the first reply
    was recorded. Replies that were extended, rewarded, or sampled side by side are no orphans. An
    equal request that is not marked as a retry is another sample.
    """
    used = {call.parent_id for call in tree}
    equal_replies: dict[tuple[object, ...], list[Interaction]] = {}
    for call in tree:
        request = (call.parent_id, call.context, call.new_ids, call.temperature)
        equal_replies.setdefault(request, []).append(call)
    orphans = set[str]()
    for replies in equal_replies.values():
        unused = [r for r in replies if r.interaction_id not in used and r.reward is None]
        for retry in (reply for reply in replies if reply.is_retry):
            before = [reply for reply in unused if 0 < reply.answered_at <= retry.asked_at]
            if before:  # the retry repeats the newest
                orphans.add(before[-1].interaction_id)
                unused.remove(before[-1])
    return frozenset(orphans)


def find_interaction_to_reward(tree: InteractionTree, interaction_id: str | None) -> Interaction:
    """Return the interaction of this id; for None the last completed one that is not auxiliary."""
    auxiliary = find_auxiliary_reply_reasons(tree)
    if interaction_id is None:
        for interaction in reversed(list(tree)):
            if interaction.completed and interaction.interaction_id not in auxiliary:
                return interaction
        but = f" but the {len(auxiliary)} of auxiliary conversations" if auxiliary else ""
        raise InvalidRewardError(f"the session has no completed interaction to reward{but}")
    if interaction_id in auxiliary:
        raise InvalidRewardError(
            f"interaction {interaction_id!r} is of an auxiliary conversation "
            f"({auxiliary[interaction_id]}), which earns nothing"
        )
    if interaction_id not in tree:
        ids = ", ".join(interaction.interaction_id for interaction in tree) or "none"
        raise UnknownInteractionError(
            f"no interaction {interaction_id!r} in this session; it has: {ids}"
        )
    return tree[interaction_id]


def give_reward(interaction: Interaction, reward: Reward, is_named: bool) -> None:
    """Set or replace the reward of an interaction, which the agent named by id if `is_named`."""
    interaction.reward, interaction.given_reward = reward.value, reward
    interaction.is_reward_named = is_named


def parse_reward(reward: object) -> Reward:
    return reward if isinstance(reward, Reward) else Reward(parse_reward_number(reward))


def compute_episode_reward(tree: InteractionTree, is_credited: bool = False) -> float | None:
    """Return the sum of all rewards of a session; None without any.

    If each is all that its reply earned (`is_credited`), they overlap, and the last one counts.
    """
    rewards = [interaction.reward for interaction in tree if interaction.reward is not None]
    return sum_rewards(*(rewards[-1:] if is_credited else rewards))


def list_conversations(tree: InteractionTree) -> list[RecordedConversationSummary]:
    """Return the beginning of each conversation of a session, in order of completion."""
    root_of = _map_replies_to_roots(tree)
    replies: dict[str, int] = {}
    for root in root_of.values():
        replies[root] = replies.get(root, 0) + 1
    summaries = []
    for root, count in replies.items():
        first = tree[root]
        tools = decode_rendering_context(first.context).tools
        dicts = (
            [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
        )
        functions = [tool.get("function", tool) for tool in dicts]
        names = [str(item.get("name", "")) for item in functions if isinstance(item, dict)]
        summaries.append(
            RecordedConversationSummary(root, first.new_messages, first.reply, names, count)
        )
    return summaries


def find_auxiliary_reply_reasons(tree: InteractionTree) -> dict[str, str]:
    """Return the reason that a reply's conversation is auxiliary, by the id of such a reply."""
    if not tree.auxiliary:
        return {}
    return {
        reply: tree.auxiliary[root]
        for reply, root in _map_replies_to_roots(tree).items()
        if root in tree.auxiliary
    }


def find_conversation_replies(tree: InteractionTree, roots: Collection[str]) -> list[Interaction]:
    return [tree[reply] for reply, root in _map_replies_to_roots(tree).items() if root in roots]


def _map_replies_to_roots(tree: InteractionTree) -> dict[str, str]:
    root: dict[str, str] = {}
    for call in tree:  # parents come first
        root[call.interaction_id] = root[call.parent_id] if call.parent_id else call.interaction_id
    return root

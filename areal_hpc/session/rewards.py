"""Rewards of interactions.

An agent rewards one interaction by its id, or the last one completed. Failed requests never
become interactions, so they never count as the last.
"""

from areal_hpc.errors import InvalidRewardError, UnknownInteractionError
from areal_hpc.session.auxiliary import find_auxiliary_reply_reasons
from areal_hpc.session.credit import sum_rewards
from areal_hpc.session.tree import Interaction, InteractionTree
from areal_hpc.wire.agent_reward import Reward, parse_reward_number


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

"""Credit passes back from what followed to what led to it, and never between siblings."""

import math
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import InvalidRewardError
from areal_hpc.session.chat_template import Message
from areal_hpc.session.credit import CreditRule, compute_credited_rewards, find_retry_orphans
from areal_hpc.session.tree import InteractionTree
from areal_hpc.wire.agent_reward import MAX_REWARD
from tests.unit.session.model_stub import assistant, branches, say, turn, user

discounts = st.floats(0, 1)
rewards = st.one_of(st.none(), st.floats(-10, 10))


def totals(
    tree: InteractionTree,
    turn_discount: float = 0.5,
    rule: CreditRule = "tree",
    left_out: Collection[str] = (),
) -> list[float | None]:
    earned = compute_credited_rewards(tree, turn_discount, rule, left_out)
    assert [*earned] == [one.interaction_id for one in tree if one.interaction_id in earned]
    return [earnings.total for earnings in earned.values()]


def one_after_another(
    given: Sequence[float | None], *, in_one_conversation: bool = True
) -> InteractionTree:
    tree = InteractionTree()
    messages: list[Message] = []
    for number, reward in enumerate(given):
        asked = user(f"agent {number}")
        history = [*messages, asked] if in_one_conversation else [asked]
        say(tree, history, "x", during=(number, number + 0.5)).reward = reward
        messages += [asked, assistant("x")]
    return tree


@given(st.lists(rewards, max_size=5), st.floats(-10, 10), discounts)
def test_all_rules_agree_on_turns_that_follow_one_another(
    earlier: list[float | None], last: float, discount: float
) -> None:
    given_rewards = [*earlier, last]
    expected = [last]
    for reward in reversed(earlier):
        expected.insert(0, (reward or 0.0) + discount * expected[0])
    for together in (True, False):
        tree = one_after_another(given_rewards, in_one_conversation=together)
        assert totals(tree, discount) == pytest.approx(expected)
        assert totals(tree, discount, "chronological") == pytest.approx(expected)


def test_several_children_pass_on_their_mean() -> None:
    tree, _ = branches(None, 1.0)
    assert totals(tree) == [0.5, None, 1.0]
    tree, _ = branches(1.0, 0.0)
    assert totals(tree) == [0.25, 1.0, 0.0]
    assert totals(tree, rule="chronological") == [0.5, 1.0, 0.0]


def test_conversations_side_by_side_keep_their_rewards_to_themselves() -> None:
    tree = InteractionTree()
    left, right = [user("left")], [user("right")]
    say(tree, left, "l1", during=(0, 1))
    say(tree, right, "r1", during=(0.5, 2))
    say(tree, [*left, *turn("l1")], "l2", during=(2, 3)).reward = 1.0
    say(tree, [*right, *turn("r1")], "r2", during=(4, 5)).reward = -1.0
    assert totals(tree) == [0.5, -0.5, 1.0, -1.0]
    assert totals(tree, rule="chronological") == [0.125, 0.25, 0.5, -1.0]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        pytest.param(
            [(0, 9), (0, 3), (3, 6)],
            [None, None, 1.0],
            id="a sibling that waited its turn is still a sibling",
        ),
        pytest.param(
            [(0, 1), (1, 4), (1, 3), (5, 6)],
            [0.25, 0.5, 0.5, 1.0],
            id="who divides the work and who joins it share the reward",
        ),
        pytest.param(
            [(0, 0)] * 3,
            [0.25, 0.5, 1.0],
            id="without times they follow one another as they were completed",
        ),
    ],
)
def test_credit_passes_back_to_agents_that_had_answered_before_another_was_asked(
    times: list[tuple[float, float]], expected: list[float | None]
) -> None:
    tree = InteractionTree()
    for number, during in enumerate(times):
        say(tree, [user(f"agent {number}")], "x", during=during)
    tree.last_completed.reward = 1.0
    assert totals(tree) == expected


def test_the_last_turn_before_a_hand_over_gets_the_credit_not_a_forgotten_branch() -> None:
    tree, _ = branches(None, None)
    say(tree, [user("other agent")], "x", during=(3, 4)).reward = 1.0
    assert totals(tree) == [0.25, None, 0.5, 1.0]


def test_an_interaction_without_any_reward_after_it_earns_nothing_or_by_arrival_zero() -> None:
    tree = one_after_another([1.0, None])
    assert totals(tree) == [1.0, None]
    assert totals(tree, rule="chronological") == [1.0, 0.0]
    assert totals(InteractionTree()) == []


def test_earnings_stay_within_what_a_shard_can_hold() -> None:
    assert totals(one_after_another([MAX_REWARD, MAX_REWARD]), 1.0)[0] == MAX_REWARD


@pytest.mark.parametrize("discount", [math.nan, math.inf])
def test_a_discount_is_finite(discount: float) -> None:
    with pytest.raises(InvalidRewardError, match="finite"):
        compute_credited_rewards(InteractionTree(), discount)


def test_a_reply_whose_request_was_sent_again_is_an_orphan_and_may_be_left_out() -> None:
    tree = InteractionTree()
    lost = say(tree, [user("a")], "one", during=(0, 1))
    say(tree, [user("a")], "two", during=(2, 3), is_retry=True)
    assert find_retry_orphans(tree) == {lost.interaction_id}
    tree.last_completed.reward = 1.0
    assert totals(tree, left_out=find_retry_orphans(tree)) == [1.0]


def test_replies_that_were_extended_or_rewarded_are_no_orphans() -> None:
    tree = InteractionTree()
    say(tree, [user("a")], "one", during=(0, 1))
    say(tree, [user("a")], "two", during=(2, 3)).reward = 0.0
    say(tree, [user("a"), *turn("one")], "x", during=(4, 5))
    say(tree, [user("a")], "three", during=(6, 7), is_retry=True)
    assert find_retry_orphans(tree) == frozenset()


def test_a_retry_takes_the_place_of_one_reply() -> None:
    tree = InteractionTree()
    votes = [say(tree, [user("a")], text, during=(at, at + 1)) for at, text in enumerate("xyz")]
    say(tree, [user("a")], "w", during=(4, 5), is_retry=True)
    assert find_retry_orphans(tree) == {votes[-1].interaction_id}


def test_replies_sampled_side_by_side_are_no_orphans() -> None:
    tree = InteractionTree()
    for text in ("one", "two"):
        say(tree, [user("a")], text, during=(0, 1), is_retry=True)
    assert find_retry_orphans(tree) == frozenset()

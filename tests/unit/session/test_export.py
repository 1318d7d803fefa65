"""Trees become training rows: exact tokens, who said them, and each trained once."""

import numpy as np
import pytest

from areal_hpc.session.export import EpisodeKey, export_rows, plan_rows
from areal_hpc.session.rewards import (
    RewardRefused,
    check_reward,
    final_reward,
    rewarded_interaction,
    set_rewards,
)
from areal_hpc.session.tree import InteractionTree, ids_of
from tests.unit.session.model_stub import assistant, prompt_ids, say, user

KEY = EpisodeKey(ticket_id=5, attempt=1, episode=2)


def chain(tree, *replies):
    messages, said = [], []
    for number, reply in enumerate(replies):
        messages.append(user(str(number)))
        said.append(say(tree, messages, reply, version=number))
        messages.append(assistant(reply))
    return said


def test_a_conversation_is_one_row_with_every_reply_trained():
    tree = InteractionTree()
    said = chain(tree, "one", "two", "three")
    said[-1].reward = 0.5
    (row,) = export_rows(tree, KEY)
    last = said[-1]
    assert row.input_ids_T.tolist() == prompt_ids(tree, last) + ids_of(last.output_ids).tolist()
    assert row.loss_mask_T.sum() == sum(one.output_tokens for one in said)
    assert (row.versions_T == -1).tolist() == (row.loss_mask_T == 0).tolist()
    assert sorted(set(row.versions_T.tolist())) == [-1, 0, 1, 2]
    assert (row.logprobs_T[row.loss_mask_T == 0] == 0).all()
    assert (row.logprobs_T[row.loss_mask_T == 1] < 0).all()
    assert (row.ticket_id, row.attempt, row.episode, row.row, row.reward) == (5, 1, 2, 0, 0.5)
    assert row.meta["interaction_ids"] == [one.interaction_id for one in said]


def test_a_shared_reply_is_trained_in_one_row_only():
    tree = InteractionTree()
    first = say(tree, [user("a")], "one")
    history = [user("a"), assistant("one")]
    say(tree, [*history, user("b")], "left")
    say(tree, [*history, user("c")], "right").reward = 1.0
    left, right = export_rows(tree, KEY)
    shared = slice(first.prompt_tokens, first.sequence_tokens)
    assert left.loss_mask_T[shared].all()
    assert not right.loss_mask_T[shared].any()
    assert (right.versions_T[shared] == -1).all()
    assert np.array_equal(left.input_ids_T[shared], right.input_ids_T[shared])
    assert [row.row for row in (left, right)] == [0, 1]


def test_a_leaf_without_reward_has_the_last_reward_of_the_session():
    tree = InteractionTree()
    say(tree, [user("a")], "one").reward = 0.25
    say(tree, [user("b")], "two")
    say(tree, [user("c")], "three").reward = 0.75
    assert [row.reward for row in export_rows(tree, KEY)] == [0.25, 0.75, 0.75]


def test_replies_of_two_temperatures_are_trained_in_rows_of_their_own():
    tree = InteractionTree()
    warm = say(tree, [user("a")], "one", temperature=1.0)
    history = [user("a"), assistant("one"), user("b")]
    cool = say(tree, history, "two", temperature=0.5)
    cool.reward = 1.0
    first, second = export_rows(tree, KEY)
    assert (first.temperature, second.temperature) == (1.0, 0.5)
    assert first.num_tokens == warm.sequence_tokens
    assert first.loss_mask_T.sum() == warm.output_tokens
    assert second.loss_mask_T.sum() == cool.output_tokens
    assert [row.reward for row in (first, second)] == [1.0, 1.0]


def test_greedy_rows_have_temperature_one_because_their_logprobs_are_unscaled():
    tree = InteractionTree()
    say(tree, [user("a")], "one", temperature=0.0).reward = 1.0
    assert [row.temperature for row in export_rows(tree, KEY)] == [1.0]


def test_a_session_without_reward_is_refused():
    tree = InteractionTree()
    chain(tree, "one")
    with pytest.raises(ValueError, match="without any reward"):
        export_rows(tree, KEY)


def test_an_empty_session_has_no_rows():
    assert plan_rows(InteractionTree()) == export_rows(InteractionTree(), KEY) == []


def test_the_last_completed_interaction_is_rewarded_by_default():
    tree = InteractionTree()
    said = chain(tree, "one", "two")
    assert rewarded_interaction(tree, None) is said[-1]
    assert rewarded_interaction(tree, said[0].interaction_id) is said[0]
    with pytest.raises(RewardRefused, match=said[0].interaction_id):
        rewarded_interaction(tree, "chatcmpl-unknown")
    with pytest.raises(RewardRefused, match="no completed interaction"):
        rewarded_interaction(InteractionTree(), None)


@pytest.mark.parametrize(
    "reward", [float("nan"), float("inf"), 1e39, 10**400, None, "1", 1j, np.ones(2)]
)
def test_rewards_are_finite_numbers(reward):
    with pytest.raises(RewardRefused, match="finite"):
        check_reward(reward)


@pytest.mark.parametrize("reward", [1.0, 1, True, np.float32(1), np.int8(1), np.bool_(1)])
def test_every_kind_of_number_is_a_reward(reward):
    assert check_reward(reward) == 1.0
    assert type(check_reward(reward)) is float


def test_rewards_by_id_are_all_set_or_none():
    tree = InteractionTree()
    first, second = chain(tree, "one", "two")
    set_rewards(tree, {first.interaction_id: 1, second.interaction_id: 0.5})
    set_rewards(tree, {first.interaction_id: True})
    assert [one.reward for one in tree] == [1.0, 0.5]
    known = f"{first.interaction_id}, {second.interaction_id}"
    with pytest.raises(RewardRefused, match=f"no interaction 'resp-1' .*it has: {known}"):
        set_rewards(tree, {first.interaction_id: 0.0, "resp-1": 1.0})
    with pytest.raises(RewardRefused, match="finite"):
        set_rewards(tree, {first.interaction_id: 0.0, second.interaction_id: float("nan")})
    assert [one.reward for one in tree] == [1.0, 0.5]


def test_the_final_reward_is_the_last_one_given():
    tree = InteractionTree()
    said = chain(tree, "one", "two", "three")
    assert final_reward(tree) is None
    said[1].reward = 0.5
    assert final_reward(tree) == 0.5

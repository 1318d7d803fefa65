"""Credit passes back to earlier replies; trees become rows of exact tokens, each trained once."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_hpc.errors import InvalidRewardError
from areal_hpc.session.chat_template import Message
from areal_hpc.session.credit import (
    CreditRule,
    compute_credited_rewards,
    find_interaction_to_reward,
    find_retry_orphans,
    give_reward,
)
from areal_hpc.session.export import (
    EpisodeKey,
    ExportStyle,
    build_failed_session_rows,
    build_training_rows,
    plan_rows,
)
from areal_hpc.session.tree import (
    Interaction,
    InteractionTree,
    pack_counts_as_uint16,
    pack_ids,
    unpack_ids,
)
from areal_hpc.wire.agent_reward import MAX_REWARD, Reward
from areal_hpc.wire.proxy import ExportSettings
from areal_hpc.wire.trajectory import RowKind, RowRecord
from tests.support.prompt_audit import prompt_ids
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
    assert [*earned] == [node.interaction_id for node in tree if node.interaction_id in earned]
    return [earnings.total for earnings in earned.values()]


def one_after_another(
    given: Sequence[float | None], *, in_one_conversation: bool = True
) -> InteractionTree:
    tree = InteractionTree()
    messages: list[Message] = []
    for number, reward in enumerate(given):
        question = user(f"agent {number}")
        history = [*messages, question] if in_one_conversation else [question]
        say(tree, history, "x", during=(number, number + 0.5)).reward = reward
        messages += [question, assistant("x")]
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


SUB_AGENT_EPISODE: Sequence[tuple[str, str, str, tuple[float, float]]] = [
    # agent, parent, what it is asked, when
    ("main", "", "plan", (0, 1)),
    ("left", "main", "half", (2, 5)),
    ("right", "main", "half", (3, 4)),
    ("deep", "left", "detail", (5, 6)),
    ("left", "main", "half, again", (7, 8)),
    ("other", "", "aside", (2, 9)),
    ("main", "", "plan, then", (10, 11)),
]
"""Orchestrator with two sub-agents at once, one of which calls another, beside another agent."""


@pytest.mark.parametrize(
    ("rule", "earned"),
    [
        ("tree", [0.5, None, None, None, None, None, 1.0]),
        ("agents", [0.15625, 0.125, 0.5, 0.25, 0.5, None, 1.0]),
        ("chronological", [0.5**6, 0.5**5, 0.5**3, 0.5**2, 0.5, 0.5**4, 1.0]),
    ],
)
def test_a_reward_reaches_sub_agents_by_their_ids(
    rule: CreditRule, earned: list[float | None]
) -> None:
    tree, histories = InteractionTree(), dict[str, list[Message]]()
    for agent, parent, question, during in SUB_AGENT_EPISODE:
        messages = histories.setdefault(agent, [])
        messages.append(user(question))
        say(tree, messages, f"{agent} says", agent=(agent, parent), during=during)
        messages.append(assistant(f"{agent} says"))
    tree.last_completed.reward = 1.0
    assert totals(tree, 0.5, rule) == pytest.approx(earned)


def test_a_sub_agent_lies_between_two_conversations_of_its_parent() -> None:
    tree = InteractionTree()
    say(tree, [user("plan")], "ask", agent=("main", ""), during=(0, 1))
    say(tree, [user("half")], "done", agent=("sub", "main"), during=(2, 3))
    say(tree, [user("sum up")], "all", agent=("main", ""), during=(4, 5)).reward = 1.0
    assert totals(tree, 0.5, "agents") == [0.25, 0.5, 1.0]


def test_sub_agents_without_times_lead_to_no_cycle() -> None:
    tree = InteractionTree()
    for agent, parent in (("a", "b"), ("b", ""), ("c", "b")):
        say(tree, [user(agent)], "one", agent=(agent, parent)).reward = 1.0
    assert totals(tree, 1.0, "agents") == [1.0, 2.0, 1.0]


def test_conversations_of_two_agents_never_join() -> None:
    tree, history = InteractionTree(), [user("a"), *turn("one")]
    say(tree, history[:1], "one", agent=("x", ""))
    joined = say(tree, history, "two", agent=("x", ""))
    apart = say(tree, history, "two", agent=("y", ""))
    assert (joined.reuse, apart.reuse, apart.parent_id) == ("reused", "none", None)


KEY = EpisodeKey(ticket_id=5, attempt=1, episode=2)
ADD = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def chain(tree: InteractionTree, *replies: str) -> list[Interaction]:
    messages: list[Message] = []
    nodes: list[Interaction] = []
    for number, reply in enumerate(replies):
        messages.append(user(str(number)))
        nodes.append(say(tree, messages, reply, version=number))
        messages.append(assistant(reply))
    return nodes


def test_a_conversation_is_one_row_with_every_reply_trained() -> None:
    tree = InteractionTree()
    replies = chain(tree, "one", "two", "three")
    replies[-1].reward = 0.5
    (row,) = build_training_rows(tree, KEY)
    last = replies[-1]
    assert row.input_ids_T.tolist() == prompt_ids(tree, last) + unpack_ids(last.output_ids).tolist()
    assert row.loss_mask_T.sum() == sum(reply.num_output_tokens for reply in replies)
    assert (row.versions_T == -1).tolist() == (row.loss_mask_T == 0).tolist()
    assert sorted(set(row.versions_T.tolist())) == [-1, 0, 1, 2]
    assert (row.logprobs_T[row.loss_mask_T == 0] == 0).all()
    assert (row.logprobs_T[row.loss_mask_T == 1] < 0).all()
    assert (row.ticket_id, row.attempt, row.episode, row.row, row.reward) == (5, 1, 2, 0, 0.5)
    assert [call.id for call in row.record.calls] == [reply.interaction_id for reply in replies]


def test_every_row_has_the_rewards_of_its_whole_episode() -> None:
    tree = InteractionTree()
    replies = chain(tree, "one", "two", "three")
    replies[0].reward, replies[1].reward = -0.25, 1.0
    (row,) = build_training_rows(tree, KEY)
    assert row.reward == 0.75
    rows = build_training_rows(tree, KEY, settings=ExportSettings("individual"))
    assert [row.reward for row in rows] == [0.75] * 3
    for row, reply in zip(rows, replies, strict=True):
        assert row.num_tokens == reply.num_sequence_tokens
        assert row.loss_mask_T.tolist() == [0] * reply.prompt_tokens + [1] * reply.num_output_tokens
        assert row.input_ids_T.tolist()[: reply.prompt_tokens] == prompt_ids(tree, reply)


def test_a_row_names_the_tools_of_each_call_and_holds_their_schemas_once() -> None:
    tree = InteractionTree()
    history = [user("a")]
    say(tree, history, "one", tools=ADD, variables={"depth": 1})
    say(tree, [*history, *turn("one")], "two", tools=ADD, variables={"depth": 1}).reward = 1.0
    say(tree, history, "three").reward = 1.0
    with_tools, without = build_training_rows(tree, KEY)
    first, second = with_tools.record.calls
    assert first.tools == second.tools != ""
    assert with_tools.tool_schemas == {first.tools: ADD}
    assert first.template_variables == {"depth": 1}
    assert (without.record.calls[0].tools, without.tool_schemas) == ("", {})


def test_a_call_keeps_its_own_reward_whatever_the_row_earned() -> None:
    tree, (first, left, right) = branches(0.25, None)
    give_reward(right, Reward(0.5, parts={"format": 0.5}), is_named=True)
    record = RowRecord(session_id="s", task_index=3)
    expected: dict[ExportStyle, list[float]] = {"concat": [0.75] * 2, "individual": [0.75] * 3}
    for style, rewards in expected.items():
        rows = build_training_rows(tree, KEY, record, ExportSettings(style))
        assert [row.reward for row in rows] == rewards
        calls = {call.id: call.reward for row in rows for call in row.record.calls}
        assert calls == {
            first.interaction_id: None,
            left.interaction_id: Reward(0.25),
            right.interaction_id: Reward(0.5, parts={"format": 0.5}),
        }
        assert {(row.record.session_id, row.record.task_index) for row in rows} == {("s", 3)}
    shared = [row.record.calls[0].trained for row in build_training_rows(tree, KEY)]
    assert shared == [True, False]


def test_a_failed_session_is_kept_whole_whatever_was_rewarded() -> None:
    tree, (_, left, right) = branches(1.0, None)
    right.finish_reason = "abort"  # its client had left
    key = replace(KEY, kind=RowKind.FAILED)
    record = RowRecord(error="why")
    rows = build_failed_session_rows(tree, key, record)
    assert [row.record.calls[-1].id for row in rows] == [left.interaction_id, right.interaction_id]
    assert [(row.kind, row.reward, row.record.error) for row in rows] == [
        (RowKind.FAILED, 1.0, "why"),
        (RowKind.FAILED, 0.0, "why"),
    ]
    sampled = sum(node.num_output_tokens for node in tree)
    assert sum(int(row.loss_mask_T.sum()) for row in rows) == sampled
    (empty,) = build_failed_session_rows(InteractionTree(), key, record)
    assert (empty.num_tokens, empty.record.calls, empty.record.error) == (0, [], "why")


def test_a_branch_that_nobody_judged_is_no_row_but_what_it_shares_is_trained() -> None:
    tree, (first, left, right) = branches(None, 1.0)
    (row,) = build_training_rows(tree, KEY)
    assert [call.id for call in row.record.calls] == [first.interaction_id, right.interaction_id]
    assert row.loss_mask_T.sum() == first.num_output_tokens + right.num_output_tokens
    assert row.record.unrewarded_replies == 1
    plans = plan_rows(tree, ExportSettings("individual"))
    assert [plan.trained for plan in plans] == [{first.interaction_id}, {right.interaction_id}]
    plans = plan_rows(tree, ExportSettings("individual", credit="chronological"))
    assert {left.interaction_id} in [plan.trained for plan in plans]


EPISODES: dict[str, tuple[list[tuple[str, str, tuple[float, float]]], list[float | None]]] = {
    # conversation that goes on, reply, time; earnings of each at a turn discount of .5
    "a sub-agent as a tool": (
        [("planner", "", (0, 1)), ("worker", "", (2, 3)), ("planner", "0", (4, 5))],
        [0.25, 0.5, 1.0],
    ),
    "a hand-off before the end": ([("planner", "", (0, 3)), ("worker", "", (2, 4))], [0.5, 1.0]),
    "a vote": ([("vote", "", (0, 1))] * 3, [0.25, 0.5, 1.0]),
    "a title that ends last": (
        [("task", "", (0, 1)), ("task", "0", (2, 3)), ("title", "", (2.5, 3.5))],
        [0.25, 0.5, 1.0],
    ),
}


@pytest.mark.parametrize("scene", EPISODES)
def test_a_reward_of_the_episode_trains_all_its_replies(scene: str) -> None:
    calls, earned = EPISODES[scene]
    tree = InteractionTree()
    for who, after, during in calls:
        history = [user(who)] if not after else [user(who), *turn("said by " + who)]
        say(tree, history, "said by " + who, during=during)
    give_reward(tree.last_completed, Reward(1.0), is_named=False)
    rewards = compute_credited_rewards(tree, 0.5)
    assert [credit.total for credit in rewards.values()] == earned
    for style in ("concat", "individual"):
        rows = build_training_rows(
            tree, KEY, settings=ExportSettings(style, drop_retry_orphans=False)
        )
        trained = [call.id for row in rows for call in row.record.calls if call.trained]
        assert sorted(trained) == sorted(node.interaction_id for node in tree)
        assert {row.reward for row in rows} == {1.0}
        assert {row.record.unrewarded_replies for row in rows} == {0}


def test_what_comes_before_a_reply_that_its_client_left_is_followed_by_what_comes_after() -> None:
    tree = InteractionTree()
    first = say(tree, [user("a")], "one", during=(0, 1))
    left = say(tree, [user("b")], "two", during=(2, 3))
    last = say(tree, [user("c")], "three", during=(4, 5))
    left.finish_reason, last.reward = "abort", 1.0
    for style in ("concat", "individual"):
        for credit in ("tree", "chronological"):
            rows = build_training_rows(tree, KEY, settings=ExportSettings(style, credit))
            calls = {call.id: call for row in rows for call in row.record.calls}
            assert calls.keys() == {first.interaction_id, last.interaction_id}
            assert calls[first.interaction_id].followers == [last.interaction_id]


def test_a_reward_that_a_client_passed_back_elsewhere_is_no_replys_own() -> None:
    tree = InteractionTree()
    first, last = chain(tree, "one", "two")
    give_reward(first, Reward(1.0, parts={"format": 0.5}), is_named=True)
    first.reward, last.reward = None, 0.0
    (row,) = build_training_rows(tree, KEY, settings=ExportSettings(is_credited=True))
    assert [call.reward for call in row.record.calls] == [None, Reward(0.0)]


def test_retry_orphans_are_dropped_unless_they_are_wanted() -> None:
    tree = InteractionTree()
    lost = say(tree, [user("a")], "lost", during=(0, 1))
    say(tree, [user("a")], "kept", during=(2, 3), is_retry=True)
    say(tree, [user("a"), *turn("kept")], "x", during=(3, 4)).reward = 1.0
    expected: dict[ExportStyle, int] = {"concat": 1, "individual": 2}
    for style, kept in expected.items():
        assert len(plan_rows(tree, ExportSettings(style))) == kept
        plans = plan_rows(tree, ExportSettings(style, drop_retry_orphans=False))
        assert len(plans) == kept + 1
        assert plans[0].trained == {lost.interaction_id}


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.5, 1.0])), min_size=1, max_size=7),
    st.sampled_from(["concat", "individual"]),
)
def test_each_token_is_trained_once(forks: list[tuple[int, float]], style: ExportStyle) -> None:
    tree = InteractionTree()
    histories: list[list[Message]] = [[]]
    for number, (origin, temperature) in enumerate(forks):
        messages = [*histories[origin % len(histories)], user(f"q{number}")]
        reply = f"r{number}"
        say(tree, messages, reply, temperature=temperature, version=number).reward = 1.0
        histories.append([*messages, assistant(reply)])
    rows = build_training_rows(tree, KEY, settings=ExportSettings(style))
    trained = [int(v) for row in rows for v in row.versions_T[row.loss_mask_T == 1]]
    sampled = [number for number, node in enumerate(tree) for _ in range(node.num_output_tokens)]
    assert sorted(trained) == sampled
    for row in rows:
        assert (row.versions_T[row.loss_mask_T == 0] == -1).all()
        sampled_by = {*row.versions_T[row.loss_mask_T == 1].tolist()}
        assert {forks[number][1] for number in sampled_by} == {row.temperature}


def test_what_could_be_sampled_is_kept_of_the_replies_that_a_row_trains() -> None:
    tree = InteractionTree()
    first, second = chain(tree, "one", "two")
    plain = chain(tree, "three")[0]
    for reply in (first, second):
        ids = [[token, 7] for token in unpack_ids(reply.output_ids).tolist()]
        reply.kept_counts = pack_counts_as_uint16([2] * len(ids))
        reply.kept_ids = pack_ids([id_ for pair in ids for id_ in pair])
    second.reward = plain.reward = 1.0
    row, other = build_training_rows(tree, KEY, settings=ExportSettings("individual"))[1:]
    assert other.sampling_mask is None
    mask = row.sampling_mask
    assert mask is not None
    assert (mask.counts_T == 2 * row.loss_mask_T).all(), "the first reply is context here"
    said_ids = row.input_ids_T[row.loss_mask_T == 1].tolist()
    assert mask.ids.tolist() == [id_ for token in said_ids for id_ in (token, 7)]


def test_greedy_rows_have_temperature_one_because_their_logprobs_are_unscaled() -> None:
    tree = InteractionTree()
    say(tree, [user("a")], "one", temperature=0.0).reward = 1.0
    assert build_training_rows(tree, KEY)[0].temperature == 1.0


def test_a_session_without_reward_is_refused_and_an_empty_one_has_no_rows() -> None:
    tree = InteractionTree()
    assert plan_rows(tree) == []
    assert build_training_rows(tree, KEY) == []
    chain(tree, "one")
    with pytest.raises(ValueError, match="without rewards"):
        build_training_rows(tree, KEY)


def test_the_last_completed_interaction_is_rewarded_unless_another_is_named() -> None:
    tree = InteractionTree()
    with pytest.raises(InvalidRewardError, match="no completed interaction"):
        find_interaction_to_reward(tree, None)
    first, second = chain(tree, "one", "two")
    assert find_interaction_to_reward(tree, None) is second
    assert find_interaction_to_reward(tree, first.interaction_id) is first
    known = f"{first.interaction_id}, {second.interaction_id}"
    with pytest.raises(InvalidRewardError, match=f"no interaction 'resp-1' .*it has: {known}"):
        find_interaction_to_reward(tree, "resp-1")
